"""Probes of library kernels: matrix products, convolutions, fused attention, copies, fresh memory.

Inputs are random, never zeros: processors and libraries take short cuts on zeros. Nothing here interprets the figures.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optpass.passes.roofline.calibration_clock import Budget, typical
from optpass.passes.roofline.calibration_fit import GemmSample

MIB = 1 << 20

#: (batch, M, N, K): squares, and shapes that are thin in one extent or two, as heads, embeddings and gradients are.
FLOAT32_SHAPES = (
    (1, 32, 32, 32), (1, 64, 64, 64), (1, 128, 128, 128), (1, 256, 256, 256), (1, 512, 512, 512), (1, 384, 1024, 512),
    (1, 16, 512, 512), (1, 4, 512, 256), (1, 1, 512, 512), (1, 512, 1, 512), (1, 512, 16, 256), (1, 512, 33, 256),
    (1, 512, 8, 128), (1, 256, 512, 16), (1, 200, 600, 200), (1, 200, 200, 800), (1, 64, 2048, 64),
    (1, 1024, 64, 256), (8, 128, 128, 33), (8, 128, 33, 128), (1, 256, 21, 256), (1, 256, 40, 128), (4, 256, 24, 256),
    (1, 128, 72, 256), (16, 64, 64, 64), (64, 16, 16, 16), (32, 27, 27, 64),
)  # fmt: skip
#: For the other dtypes, whose loss at the edges starts from float32's.
FEW_SHAPES = (
    (1, 64, 64, 64), (1, 256, 256, 256), (1, 512, 512, 512), (1, 16, 512, 512), (1, 256, 512, 32), (8, 128, 32, 128),
)  # fmt: skip
SHAPES: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
    "float32": FLOAT32_SHAPES,
    "int8": ((1, 64, 64, 64), (1, 256, 256, 256), (1, 512, 512, 512), (1, 32, 512, 512)),
}
OTHER_DTYPES = ("bfloat16", "float16", "float64")

#: Rows and columns of a product whose second operand is read cold, and bytes of the operands that take turns.
COLD_SHAPE = (64, 1024)
COLD_BYTES = 64 * MIB

#: (batch, C_in, H = W, C_out, taps per side, stride, groups)
CONVOLUTIONS = (
    (2, 32, 16, 32, 3, 1, 1), (2, 64, 32, 64, 3, 1, 1), (1, 128, 28, 128, 3, 1, 1), (2, 64, 28, 128, 1, 1, 1),
    (2, 3, 64, 64, 7, 2, 1), (4, 3, 64, 128, 8, 8, 1), (2, 256, 8, 256, 3, 1, 1), (2, 16, 16, 16, 3, 1, 1),
    (2, 63, 20, 63, 3, 1, 1), (2, 100, 16, 50, 3, 1, 1),
)  # fmt: skip
#: One small image, which ATen does not give to oneDNN.
UNROLLED = (1, 64, 16, 64, 3, 1, 1)
BACKWARD_CONVOLUTIONS = CONVOLUTIONS[1:3]

#: Bytes that a copy reads and writes; the largest are beyond most last-level caches.
COPY_SIZES = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 192 * MIB)
#: Batch, heads, length, width of a head: a length of whole vectors, and one with a remainder.
ATTENTION = ((2, 4, 256, 64), (2, 6, 125, 33))
FRESH = 64 * MIB  # above the largest size that allocators keep for themselves (glibc: 32 MiB)


def contended() -> bool:
    """Whether parallel loops stall, because other processes hold the cores that torch's threads want.

    A copy within the caches should take less time with all threads than with one; where it takes longer even at its
    best, threads wait for each other for whole slices of the scheduler.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return False
    budget = Budget(total_s=0.1)
    source = torch.rand(1 << 17)
    target = torch.empty_like(source)
    together = typical(lambda: target.copy_(source), budget)
    try:
        torch.set_num_threads(1)
        return together > 1.5 * typical(lambda: target.copy_(source), budget)
    finally:
        torch.set_num_threads(threads)


def copies(budget: Budget) -> tuple[float, ...]:
    """Seconds of copies that read and write `COPY_SIZES` bytes."""
    found = []
    for size in COPY_SIZES:
        source = torch.rand(size // 8)
        target = torch.empty_like(source)
        found.append(typical(lambda s=source, t=target: t.copy_(s), budget))  # type: ignore[misc]
    return tuple(found)


def fresh() -> float:
    """Seconds that filling `FRESH` bytes of new memory takes."""
    return min(_once(lambda: torch.ones(FRESH // 4)) for _ in range(2))


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def products(dtype: str, budget: Budget) -> list[GemmSample]:
    """Matrix products of a dtype; empty where this torch or this processor cannot do them."""
    make = _integer_product if dtype == "int8" else _product
    kind: torch.dtype = getattr(torch, dtype)
    found = []
    for batch, m, n, k in SHAPES.get(dtype, FEW_SHAPES):
        try:
            seconds = typical(make(kind, batch, m, n, k), budget)
        except (RuntimeError, NotImplementedError, AttributeError):
            return []  # no kernel for this dtype here
        moved = batch * (m * k + k * n + m * n) * kind.itemsize
        found.append(GemmSample(m, n, k, batch, moved, seconds))
    return found


def cold(budget: Budget) -> tuple[float, ...]:
    """(warm, cold) seconds of a product whose second operand was just used, or comes from beyond the caches."""
    m, n = COLD_SHAPE
    a, out = torch.rand(m, n), torch.empty(m, n)
    weights = [torch.rand(n, n) for _ in range(COLD_BYTES // (4 * n * n))]
    warm = typical(lambda: torch.mm(a, weights[0].t(), out=out), budget)
    turn = itertools.cycle(weights)
    # One call a run: the least over runs of several would still hold only whole rounds, but fewer of them.
    rounds = Budget(run_s=0.0, total_s=4 * budget.total_s, runs=8 * len(weights), least=len(weights))
    return warm, typical(lambda: torch.mm(a, next(turn).t(), out=out), rounds)


def _product(kind: torch.dtype, batch: int, m: int, n: int, k: int) -> Callable[[], Any]:
    if batch == 1:
        a, b, out = torch.rand(m, k).to(kind), torch.rand(k, n).to(kind), torch.empty(m, n, dtype=kind)
        return lambda: torch.mm(a, b, out=out)
    a, b = torch.rand(batch, m, k).to(kind), torch.rand(batch, k, n).to(kind)
    out = torch.empty(batch, m, n, dtype=kind)
    return lambda: torch.bmm(a, b, out=out)


def _integer_product(kind: torch.dtype, batch: int, m: int, n: int, k: int) -> Callable[[], Any]:
    a, b = torch.randint(-128, 127, (m, k), dtype=kind), torch.randint(-128, 127, (k, n), dtype=kind)
    product: Callable[[Tensor, Tensor], Tensor] = torch.ops.aten._int_mm.default
    return lambda: product(a, b)


def convolutions(budget: Budget) -> list[GemmSample]:
    """Forward convolutions, in the channels-last layout that the inner compiler gives them, as products."""
    found = []
    for shape in CONVOLUTIONS:
        forward, _ = _convolution(shape)
        batch, c_in, side, c_out, taps, _, groups = shape
        out = forward()
        weights = c_out * (c_in // groups) * taps * taps
        moved = 4 * (batch * c_in * side * side + weights + out.numel())
        m, n, k = out.numel() // c_out, c_out // groups, weights // c_out
        found.append(GemmSample(m, n, k, groups, moved, typical(forward, budget)))
    return found


def unrolled(budget: Budget) -> float:
    """Seconds of a convolution that runs as im2col and a product; see `UNROLLED`."""
    return typical(_convolution(UNROLLED)[0], budget)


def convolution_gradients(budget: Budget) -> list[tuple[float, ...]]:
    """(forward, both gradients) of some convolutions, in seconds; the gradients do twice the forward's arithmetic."""
    return [(typical(f, budget), typical(b, budget)) for f, b in map(_convolution, BACKWARD_CONVOLUTIONS)]


def _convolution(shape: tuple[int, ...]) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
    """The forward, and the gradients of input and weight, of a convolution of `CONVOLUTIONS`."""
    batch, c_in, side, c_out, taps, stride, groups = shape
    last, pad = torch.channels_last, taps // 2
    x = torch.rand(batch, c_in, side, side).to(memory_format=last)
    weight = (torch.rand(c_out, c_in // groups, taps, taps) - 0.5).to(memory_format=last)

    def forward() -> Tensor:
        return F.conv2d(x, weight, stride=stride, padding=pad, groups=groups)

    gradient = torch.rand_like(forward())
    backward: Callable[..., Any] = torch.ops.aten.convolution_backward.default
    args = (gradient, x, weight, [0], [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups, [True, True, False])
    return forward, lambda: backward(*args)


def attention(budget: Budget) -> list[tuple[float, ...]]:
    """(forward, backward) of the fused attention kernel for each of `ATTENTION`, in seconds."""
    found: list[tuple[float, ...]] = []
    for shape in ATTENTION:
        query, key, value = (torch.rand(shape, requires_grad=True) for _ in range(3))
        inputs = (query, key, value)
        with torch.no_grad():
            forward = typical(lambda i=inputs: F.scaled_dot_product_attention(*i), budget)  # type: ignore[misc]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(*inputs)
        gradient = torch.rand_like(out)

        def backward(out: Tensor = out, inputs: Any = inputs, gradient: Tensor = gradient) -> Any:
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        found.append((forward, typical(backward, budget)))
    return found


def sort_seconds(budget: Budget) -> float:
    """Seconds per comparison of a stable sort of integers, n log2 n of them."""
    keys = torch.randint(0, 1 << 20, (4096,))
    return typical(lambda: torch.sort(keys, stable=True), budget) / (4096 * 12)


def bag_seconds(budget: Budget) -> float:
    """Seconds per gradient element of the backward of an embedding bag (sum) of 8192 rows."""
    table = torch.rand(8192, 64, requires_grad=True)
    indices, offsets = torch.randint(0, 8192, (4096,)), torch.arange(0, 4096, 4)
    with torch.enable_grad():
        out = F.embedding_bag(indices, table, offsets, mode="sum")
    gradient = torch.rand_like(out)
    seconds = typical(lambda: torch.autograd.grad(out, table, gradient, retain_graph=True), budget)
    return seconds / (indices.numel() * table.shape[1])
