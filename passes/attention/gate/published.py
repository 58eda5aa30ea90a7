"""Time of attention on a GPU that nobody measured: published rates of the kernels, and the roofline for the rest.

Fused: its products at the published rate of the kernel, no faster than q, k, v and the result can be moved, and no more
of the device than it has blocks for. Unfused: the kernels that Inductor makes of it, two products and one kernel for
everything between them (forward; backward four products and one kernel), each by the roofline (Williams et al., CACM
52(4), 2009). These are estimates, and every one of them says so.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from optpass.passes.attention.problem import Problem
from optpass.passes.attention.targets import arch_of, architecture, kernels
from optpass.passes.attention.targets.kernel import sources
from optpass.passes.devices import DeviceSpec
from optpass.passes.devices.dtypes import canonical_dtype, compute_dtype

FILE = "published.toml"
#: Dtypes that published rates are for.
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a kernel on a large problem, and where they were published."""

    forward: float
    backward: float
    source: str


def fused_seconds(problem: Problem, kernel: str, spec: DeviceSpec) -> tuple[float, str] | None:
    """Seconds of a fused kernel, and the source of its rate; None where nothing was published about it."""
    rate = rate_of(kernel, problem, spec)
    if rate is None:
        return None
    table = figures()
    tile: int = table["tile"]["queries"]
    flops = (
        4.0
        * _scores(problem, rows=math.ceil(problem.queries / tile) * tile)
        * _width(problem)
        * visited(problem, kernel)
    )
    if problem.mask_numel:
        flops *= table["masks"]["operand"]
    used = occupancy(problem, spec)
    moved = _operands(problem) + problem.mask_numel * problem.dtype.itemsize
    seconds = max(flops / (rate.forward * used), moved / spec.attainable_bandwidth) + spec.launch_s
    if problem.training:
        work = table["backward"]["products"] * flops
        # What was read comes again with the result and its gradient, and three gradients are written.
        seconds += max(work / (rate.backward * used), 2.5 * moved / spec.attainable_bandwidth) + 2 * spec.launch_s
    return seconds, rate.source


def unfused_seconds(problem: Problem, spec: DeviceSpec) -> float:
    """Seconds of what Inductor makes of the region: products by cuBLAS, and one kernel between them."""
    size = problem.dtype.itemsize
    scores = _scores(problem)
    flops = 2.0 * scores * _width(problem)
    whole, part = float(scores * size), _operands(problem) / 2
    product = _roofline(flops, whole + part, problem, spec)
    dropped = scores if problem.dropout else 0  # the mask of what was dropped, a byte each
    softmax = _moved(2 * whole + problem.mask_numel * size + dropped, spec)
    seconds = 2 * product + softmax + _repeated(problem, spec)
    if problem.training:
        seconds += 4 * product + _moved(3 * whole + dropped, spec) + _repeated(problem, spec)
        seconds += _moved(whole, spec) if problem.mask_grad else 0.0
    return seconds


def rate_of(kernel: str, problem: Problem, spec: DeviceSpec) -> Rate | None:
    """The published rate of a kernel on this architecture, at the nearest head dim; else a part of the peak."""
    general = figures()["kernels"].get(kernel)
    if general is None or spec.kind == "cpu":
        return None
    ratio = general["backward"] / general["forward"]
    group = architecture("cuda", arch_of(spec))
    # Rates without a head dim are medians over many shapes: good for an order, too low for a large problem.
    named = [(r.head_dim, r) for r in (group.rates if group else ()) if r.kernel == kernel and r.head_dim and r.forward]
    dtype = compute_dtype(canonical_dtype(str(problem.dtype)), spec.peak_flops)
    if named and dtype in _HALVES:
        near = min(named, key=lambda one: abs(one[0] - problem.head_dim))[1]
        forward = 1e12 * (near.forward or 0.0)
        return Rate(forward, 1e12 * near.backward if near.backward else forward * ratio, sources()[near.source])
    peak, source = spec.peak_flops[dtype], general["source"]
    faster = general.get(dtype)
    if faster and faster["peak"] in spec.peak_flops and (spec.capability or (0, 0)) >= tuple(faster["capability"]):
        peak = max(peak, spec.peak_flops[faster["peak"]] / faster["products"])
        source = f"{source}; {faster['source']}"
    return Rate(general["forward"] * peak, general["backward"] * peak, source)


def skipped(kernel: str, problem: Problem) -> frozenset[str]:
    """What a kernel does not compute where it is masked throughout: 'causal', 'window'."""
    known = kernels(problem.device).get(kernel)
    return known.skips if known is not None else frozenset()


def visited(problem: Problem, kernel: str) -> float:
    """Share of the scores that a kernel computes."""
    tile: int = figures()["tile"]["queries"]
    skips = skipped(kernel, problem)
    if problem.window is not None and "window" in skips:
        return min(1.0, (problem.window + tile) / max(1, problem.keys))
    if problem.mask != "causal" or problem.queries <= 1 or "causal" not in skips:
        return 1.0
    seen = min(problem.queries, problem.keys)
    hidden = seen * max(0, seen - tile) / 2 + max(0, problem.keys - seen) * problem.queries
    return 1.0 - hidden / (problem.queries * problem.keys)


def occupancy(problem: Problem, spec: DeviceSpec) -> float:
    """Share of the device that the kernel's blocks fill, the last wave counted; 1 for few queries, which are split."""
    tile: int = figures()["tile"]["queries"]
    if spec.sm_count is None or problem.queries <= tile:
        return 1.0
    blocks = problem.batch * problem.heads * math.ceil(problem.queries / tile)
    return blocks / (math.ceil(blocks / spec.sm_count) * spec.sm_count)


@functools.cache
def figures() -> Mapping[str, Any]:
    """`published.toml`."""
    return tomllib.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def _scores(problem: Problem, rows: int | None = None) -> int:
    return problem.batch * problem.heads * (problem.queries if rows is None else rows) * problem.keys


def _width(problem: Problem) -> float:
    return (problem.head_dim + problem.value_dim) / 2


def _operands(problem: Problem) -> float:
    """Bytes of q, k, v and the result."""
    wide = problem.head_dim + problem.value_dim
    own = problem.heads * problem.queries + problem.kv_heads * problem.keys
    return float(problem.batch * own * wide * problem.dtype.itemsize)


def _roofline(flops: float, moved: float, problem: Problem, spec: DeviceSpec) -> float:
    dtype = canonical_dtype(str(problem.dtype))
    return max(flops / spec.attainable_flops(dtype), moved / spec.attainable_bandwidth) + spec.launch_s


def _moved(amount: float, spec: DeviceSpec) -> float:
    return amount / spec.attainable_bandwidth + spec.launch_s


def _repeated(problem: Problem, spec: DeviceSpec) -> float:
    """Keys and values written out for every query head; a fused kernel reads them where they are."""
    if problem.kv_heads == problem.heads:
        return 0.0
    wide = problem.keys * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    return _moved(float(problem.batch * (problem.heads + problem.kv_heads) * wide), spec)
