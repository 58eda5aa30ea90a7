"""One way to compute attention at given sizes, timed: unfused as Inductor compiles it, SDPA's kernels, FlexAttention.

Every figure is the least of a few samples, for what disturbs a sample only ever adds to it; more are taken until the
best was met twice. Ways to compute the same thing are sampled in turns, so that what disturbs one disturbs all. Unfused
attention is written on three-dimensional operands, which Inductor's own attention patterns do not know. Which sizes are
measured is `attention_grid`'s business.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes
from torch.nn import functional as F

from optpass.bench.clocks import Call, clock
from optpass.passes.attention.blocks.operator import attention_in_blocks

UNFUSED, FLEX, BLOCKS = "unfused", "flex", "blocks"
#: Samples of a point beside the first, at least and at most, and seconds a way after which no more are taken.
SAMPLES = (2, 12)
POINT_S = 1.0
#: A figure counts as met again where the second best sample is no further from the best than this.
STEADY = 0.05
#: Seconds that one call may take; where it would take longer, fewer heads are measured.
CALL_S = 0.4
#: A call shorter than this is repeated within a sample.
REPEAT_S = 0.01
#: Bound of the softcap that is measured; its value does not matter.
CAP = 30.0
_BACKENDS: Mapping[str, str] = {
    "cpu_flash": "FLASH_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "mem_efficient": "EFFICIENT_ATTENTION",
}


@dataclass(frozen=True)
class Point:
    """Sizes of one measurement: q [heads, queries, dim], k and v [heads, keys, dim]."""

    queries: int
    keys: int
    dim: int
    heads: int

    @property
    def scores(self) -> int:
        """heads * queries * keys."""
        return self.heads * self.queries * self.keys


@dataclass
class Meter:
    """Times calls on one device in one dtype and mode.

    Attributes:
        skipped: what the device refused.
        points, unsteady: measurements so far, and those among them of which no sample was met again.
    """

    device: str
    dtype: str
    training: bool
    skipped: set[str] = field(default_factory=set)
    points: int = 0
    unsteady: int = 0
    _compiled: dict[str, Callable[..., Tensor]] = field(default_factory=dict)

    def measure(self, point: Point, ways: Mapping[str, tuple[str, str]], regions: int = 1) -> dict[str, float]:
        """ns per score of each of `ways` (name -> kernel, mask); one that the device refuses is left out.

        Args:
            regions: that many attentions one after another, each on the result of the one before.
        """
        if self.device != "cpu":
            self._fresh()
        with symbolic_shapes.config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            point = self._bearable(point, ways, regions)
            calls = self._calls(point, ways, regions)
            found, steady = least(calls, self.device)
        self.points += 1
        self.unsteady += not steady
        return {name: seconds * 1e9 / (regions * point.scores) for name, seconds in found.items()}

    def _fresh(self) -> None:
        """Forget what was compiled: a GPU's code is for one size, and a process may hold only a few sizes of one."""
        torch.compiler.reset()
        self._compiled.clear()

    def _bearable(self, point: Point, ways: Mapping[str, tuple[str, str]], regions: int) -> Point:
        """The point, or one of fewer heads where a single call would take longer than `CALL_S`."""
        ways = {name: way for name, way in ways.items() if way[0] != FLEX}  # compiled for one size, and never that slow
        fewer = Point(point.queries, point.keys, point.dim, max(1, point.heads // 16))
        tick = clock(self.device)
        slowest = max((tick(call, 1) for call in self._calls(fewer, ways, regions).values()), default=0.0)
        return fewer if slowest * point.heads / fewer.heads > CALL_S else point

    def _calls(self, point: Point, ways: Mapping[str, tuple[str, str]], regions: int) -> dict[str, Call]:
        """The ways that work, each called once."""
        made: dict[str, Call] = {}
        for name, (kernel, mask) in ways.items():
            call = self._call(point, kernel, mask, regions)
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:  # no such kernel for these operands, or no memory
                self.skipped.add(f"{kernel} {self.dtype}: {str(error).splitlines()[0][:100]}")
            else:
                made[name] = call
        return made

    def _call(self, point: Point, kernel: str, mask: str, regions: int) -> Call:
        q, k, v = (self._draw(point.heads, length, point.dim) for length in (point.queries, point.keys, point.keys))
        operand = _operand(mask, point, q)
        if kernel == FLEX:
            run = _flex(mask, point, self.device)
        else:
            run = self._run(kernel, mask, regions, point.dim)
        if not self.training:
            return lambda: _inferred(run, q, k, v, operand)
        gradient = torch.randn_like(q)
        return lambda: torch.autograd.grad(run(q, k, v, operand), (q, k, v), gradient)

    def _draw(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self.dtype)
        return torch.randn(shape, dtype=dtype, device=self.device, requires_grad=self.training)

    def _run(self, kernel: str, mask: str, regions: int, dim: int) -> Callable[..., Tensor]:
        """Compiled once for all sizes on a CPU, where code for any size is as fast as code for one.

        What calling compiled code takes is in every figure, so that it makes no difference between two. A GPU does not
        wait for it.
        """
        if kernel != UNFUSED and self.device != "cpu":
            return _fused(kernel, mask, dim)
        name = f"{kernel}_{mask}_{regions}"
        name += f"_{dim}" if kernel == BLOCKS else ""  # its scale is a number of the code
        if name not in self._compiled:
            written = _written(mask, regions) if kernel == UNFUSED else _fused(kernel, mask, dim)
            self._compiled[name] = torch.compile(_named(written, name), dynamic=self.device == "cpu")
        return self._compiled[name]


def copy_ns(device: str) -> float:
    """ns per byte written by a copy that no cache holds."""
    source = torch.ones(2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return least({"copy": lambda: target.copy_(source)}, device)[0]["copy"] * 1e9 / source.numel()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's threads set to `count` while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def least(calls: Mapping[str, Call], device: str) -> tuple[dict[str, float], bool]:
    """Least seconds per call over samples taken in turns, and whether each was met twice (within `STEADY`)."""
    tick, begun = clock(device), time.monotonic()
    once = {name: tick(call, 1) for name, call in calls.items()}
    repeats = {name: max(1, math.ceil(REPEAT_S / max(seconds, 1e-9))) for name, seconds in once.items()}
    taken: dict[str, list[float]] = {name: [seconds] for name, seconds in once.items()}
    for number in range(SAMPLES[1]):
        for name in calls if number % 2 == 0 else reversed(list(calls)):
            taken[name].append(tick(calls[name], repeats[name]))
        late = time.monotonic() - begun > POINT_S * len(calls)
        if number + 1 >= SAMPLES[0] and (late or all(map(_steady, taken.values()))):
            break
    return {name: min(samples) for name, samples in taken.items()}, all(map(_steady, taken.values()))


def _steady(samples: Sequence[float]) -> bool:
    best, second = sorted(samples)[:2]
    return second <= best * (1 + STEADY)


def _inferred(run: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    with torch.no_grad():
        return run(*operands)


def _operand(mask: str, point: Point, like: Tensor) -> Tensor:
    """The mask as it lies in memory; a number where there is none."""
    shape = (point.heads, point.queries, point.keys) if mask == "full" else (point.queries, point.keys)
    if mask == "loaded":
        return torch.ones(shape, dtype=torch.bool, device=like.device).tril()
    if mask in ("operand", "full"):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return torch.zeros((), device=like.device)


def _written(mask: str, regions: int) -> Callable[..., Tensor]:
    def masked(scores: Tensor, operand: Tensor) -> Tensor:
        if mask == "softcap":
            return torch.tanh(scores / CAP) * CAP
        if mask == "computed":
            rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[1:])
            return torch.where(rows[:, None] >= columns, scores, float("-inf"))
        if mask == "loaded":
            return scores.masked_fill(~operand, float("-inf"))
        return scores + operand if mask in ("operand", "full") else scores

    def attention(q: Tensor, k: Tensor, v: Tensor, operand: Tensor) -> Tensor:
        for _ in range(regions):
            scores = torch.bmm(q, k.transpose(1, 2)) * (1.0 / math.sqrt(q.shape[-1]))
            q = torch.bmm(F.softmax(masked(scores, operand), dim=-1), v)
        return q

    return attention


def _named(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """The function with code of its own: torch.compile counts recompiles by code, and variants share theirs."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _fused(kernel: str, mask: str, dim: int) -> Callable[..., Tensor]:
    if kernel == BLOCKS:
        return _in_blocks(mask == "causal", CAP if mask == "softcap" else 0.0, dim)
    return _sdpa(kernel, mask == "causal")


def _sdpa(kernel: str, causal: bool) -> Callable[..., Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, _BACKENDS[kernel])

    def attention(q: Tensor, k: Tensor, v: Tensor, operand: Tensor) -> Tensor:
        mask = operand[(None,) * (4 - operand.dim())] if operand.dim() else None
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=causal)[0]

    return attention


def _in_blocks(causal: bool, cap: float, dim: int) -> Callable[..., Tensor]:
    scale = dim**-0.5 / (cap or 1.0)

    def attention(q: Tensor, k: Tensor, v: Tensor, operand: Tensor) -> Tensor:
        mask = operand.float()[(None,) * (4 - operand.dim())] if operand.dim() else None
        return attention_in_blocks(q[None], k[None], v[None], mask, causal, scale, cap)[0]

    return attention


def _flex(mask: str, point: Point, device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / CAP) * CAP

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        modified = capped if mask == "softcap" else None
        out: Any = flex_attention(q, k, v, score_mod=modified, block_mask=blocks)
        found: Tensor = out
        return found

    sizes = (None, None, point.queries, point.keys)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, *sizes, device=device) if mask == "causal" else None
    compiled = torch.compile(_named(attention, f"flex_{mask}_{point.keys}"), dynamic=False)
    # Four dims from the start: on a CPU its template fails on views of tensors of three that the graph is given.
    return lambda q, k, v, operand: compiled(q[None], k[None], v[None])[0]
