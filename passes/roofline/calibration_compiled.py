"""Probes of compiled loops: what an element costs by class of operation, and what a kernel and a graph call cost.

Two small functions are compiled with the default compiler of `torch.compile`. The first has one loop per class, each
over an input of its own with a symbolic size, so that one compilation serves every probe: a class costs what the call
takes with its input large, less what it takes with every input small. Where nothing can be compiled the functions
run eagerly, and the figures say what eager kernels cost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optpass.passes.roofline.calibration_clock import Budget, typical

log = logging.getLogger(__name__)

#: Elements of a large input: 256 KiB of float32, which stays in the second-level cache together with the result.
LARGE = 1 << 16
SMALL = 32
_CHAIN = 16
_ROW = 256
_TABLE = 512

#: Classes of operations, by the input of `_loops` that carries each.
CLASSES = (
    "load", "arithmetic", "divide", "exp", "erf", "tanh", "log", "sqrt", "sin", "pow", "random", "half",
    "reduce_inner", "reduce_outer", "transpose", "gather", "scatter",
)  # fmt: skip


def _loops(
    load: Tensor, arithmetic: Tensor, divide: Tensor, exp: Tensor, erf: Tensor, tanh: Tensor, log_: Tensor,
    sqrt: Tensor, sin: Tensor, pow_: Tensor, random: Tensor, half: Tensor, reduce_inner: Tensor,
    reduce_outer: Tensor, transpose: Tensor, gather: Tensor, scatter: Tensor, table: Tensor, rows: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One loop per class, each of one load, one multiply and add, the class's operation, and one store.

    Random numbers end in a mask, as dropout stores it: storing flags keeps the compiler from vectorising the
    generator, and takes twice as long as storing the numbers.
    """
    chain = arithmetic
    for _ in range(_CHAIN):
        chain = chain * 0.5 + 0.25
    return (
        load * 0.5 + 0.25, chain, 1.5 / (divide * 0.5 + 0.25), torch.exp(exp * 0.5 + 0.25), torch.erf(erf * 0.5 + 0.25),
        torch.tanh(tanh * 0.5 + 0.25), torch.log(log_ * 0.5 + 0.25), torch.rsqrt(sqrt * 0.5 + 0.25),
        torch.sin(sin * 0.5 + 0.25), torch.pow(pow_ * 0.5 + 0.25, 1.7), torch.rand_like(random) > 0.1,
        half * 0.5 + 0.25, (reduce_inner * 0.5 + 0.25).sum(-1),
        (reduce_outer * 0.5 + 0.25).sum(0), (transpose.t() * 0.5 + 0.25).contiguous(), table[gather] * 0.5 + 0.25,
        torch.zeros_like(table).index_put((scatter,), rows, accumulate=True),
    )  # fmt: skip


def _inputs(large: str | None) -> dict[str, Tensor]:
    """The inputs of `_loops`: `large` names the one that is large; None makes all large, and no two sizes equal."""
    sizes = {name: LARGE if name == large else SMALL for name in CLASSES}
    if large is None:
        sizes = {name: LARGE + 16 * i for i, name in enumerate(CLASSES)}
    made = {name: torch.rand(size) + 0.5 for name, size in sizes.items()}
    made["half"] = made["half"].to(torch.bfloat16)
    for i, name in enumerate(("reduce_inner", "reduce_outer", "transpose")):
        shape = _shape(large is None or name == large)
        skew = 16 * (i + 1) if large is None else 0
        made[name] = torch.rand(shape[0] + 2 * skew, shape[1] + skew)
    width = 64
    for name in ("gather", "scatter"):
        made[name] = torch.randint(0, _TABLE, (max(4, sizes[name] // width + (name == "scatter")),))
    return {**made, "table": torch.rand(_TABLE, width), "rows": torch.rand(len(made["scatter"]), width)}


def _shape(large: bool) -> tuple[int, int]:
    return (LARGE // _ROW, _ROW) if large else (8, 32)


def _layers(count: int) -> nn.Module:
    """`count` layers with a library call and a compiled kernel each: nothing but calls, on tensors this small."""
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.ReLU())))


def compiled(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], dynamic: bool
) -> tuple[Callable[..., Any], bool]:
    """`function` compiled and called once; the function itself, and False, where that is not possible here."""
    candidate = torch.compile(function, dynamic=dynamic)
    try:
        candidate(*inputs)
    except Exception as error:  # noqa: BLE001  any failure of a compiler means the same here: none to be had
        log.warning("calibration: torch.compile does not work here (%s); eager kernels stand in", type(error).__name__)
        return function, False
    return candidate, True


def element_seconds(budget: Budget) -> tuple[dict[str, float], float, bool]:
    """Seconds per element by class, seconds of a call in which every loop is small, and whether it was compiled."""
    first = _inputs(None)
    call, real = compiled(_loops, tuple(first.values()), dynamic=True)
    # What every class is held against is measured in between as well, so that a busy moment does not fall on it alone.
    idle = min(_seconds(call, None, budget) for _ in range(3))
    times = {}
    for name in CLASSES:
        times[name] = _seconds(call, name, budget)
        idle = min(idle, _seconds(call, None, budget))
    whole = {name: max(0.0, seconds - idle) / LARGE for name, seconds in times.items()}
    load = whole.pop("load")
    arithmetic = max(0.0, whole.pop("arithmetic") - load) / (2 * _CHAIN - 2)
    found = {name: max(arithmetic, seconds - load) for name, seconds in whole.items()}
    found |= {"load": load, "arithmetic": arithmetic}
    # What these do instead of a load and a store of one element is their whole cost.
    found |= {name: max(whole[name], arithmetic) for name in ("gather", "scatter", "reduce_inner", "reduce_outer")}
    return found, idle, real


def _seconds(call: Callable[..., Any], large: str | None, budget: Budget) -> float:
    values = _inputs(large if large is not None else "")
    return typical(lambda: call(*values.values()), budget)


def call_seconds(budget: Budget) -> tuple[float, float, float]:
    """Seconds of one kernel call, of a graph's call besides its kernels, and of its backward besides its kernels.

    A kernel's share holds the guards on its parameters, as both grow with a model's depth.
    """
    x, short, long = torch.rand(8, 8), 2, 8
    times = {}
    for count in (short, long):
        call, _ = compiled(_layers(count), (x,), dynamic=False)
        times[count] = typical(lambda call=call: call(x), budget)  # type: ignore[misc]
    kernel = max(1e-7, (times[long] - times[short]) / (2 * (long - short)))
    graph = max(1e-6, times[short] - 2 * short * kernel)
    with torch.enable_grad():
        model = _layers(short)
        whole, _ = compiled(lambda x: model(x).square().mean(), (x,), dynamic=False)

        def step() -> None:
            torch.autograd.backward(whole(x))
            for parameter in model.parameters():
                parameter.grad = None

        trained = typical(step, budget)
    # The backward of a layer: two products, the gradient of the activation, and the bias's sum.
    return kernel, graph, max(graph, trained - times[short] - 4 * short * kernel)
