"""Reductions and scans over n elements with o outputs.

sum, prod, amax, argmax, any, all: n. mean: n + o. var: 4n + 2o (mean n + o; subtract, square, sum 3n; divide
o); std: + o. 2-norm: 2n + o. logsumexp: 4n + 2o. Scans count n (cumsum, cumprod, cummax) or 7n
(logcumsumexp). Not here: normalisations, softmax, pooling, sorting.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.pointwise import elementwise
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, is_complex, numel, shape, wrap_dims


def reduce_cost(c: Call, per_input: int, per_output: int = 0, t_in: int = 0, t_out: int = 0) -> OpCost:
    n, o = first_numel(c.at(0)), _outputs(c)
    factor = 2 if is_complex(c.at(0)) else 1
    return OpCost((per_input * n + per_output * o) * factor, "reduction", transcendental=t_in * n + t_out * o)


def _outputs(c: Call) -> int:
    if any(True for _ in _out_tensors(c)):
        return first_numel(c.out)
    sizes = shape(c.at(0))
    kept = set(range(len(sizes))) - set(wrap_dims(c.arg("dim", c.arg("dims")), len(sizes)))
    return prod(sizes[d] for d in kept)


def _out_tensors(c: Call) -> Any:
    return [x for x in (c.out if isinstance(c.out, list | tuple) else [c.out]) if hasattr(x, "shape")]


@register(
    "sum",
    "nansum",
    "prod",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "any",
    "all",
    "_is_all_true",
    "_is_any_true",
    "count_nonzero",
    "hash_tensor",
    "sum_to_size",
    "prims::sum",
    "prims::prod",
    "prims::amax",
    "prims::amin",
    "prims::xor_sum",
)
def _one_per_input(c: Call) -> OpCost:
    # nansum and count_nonzero test each element as well.
    return reduce_cost(c, 2 if c.base in ("nansum", "count_nonzero") else 1)


@register("aminmax", "_aminmax")
def _aminmax(c: Call) -> OpCost:
    return reduce_cost(c, 2)


@register("mean")
def _mean(c: Call) -> OpCost:
    return reduce_cost(c, 1, 1)


@register("nanmean")
def _nanmean(c: Call) -> OpCost:
    # test, select and count each element, then divide
    return reduce_cost(c, 4, 1)


@register("var", "var_mean", "prims::var")
def _var(c: Call) -> OpCost:
    return reduce_cost(c, 4, 2)


@register("std", "std_mean")
def _std(c: Call) -> OpCost:
    return reduce_cost(c, 4, 3, t_out=1)


@register("logsumexp", "special_logsumexp")
def _logsumexp(c: Call) -> OpCost:
    # max, subtract, exp, sum; log and add the maximum
    return reduce_cost(c, 4, 2, t_in=1, t_out=1)


def _norm_counts(order: Any) -> tuple[int, int, int, int]:
    """(flops per input, per output, transcendental per input, per output) of the vector norm of that order."""
    if order in (None, 2, "fro"):
        return 2, 1, 0, 1  # square, sum; sqrt
    if order in (0, 1, inf, -inf):
        return 2, 0, 0, 0  # abs or compare; sum or max
    return 3, 1, 1, 1  # abs, pow, sum; pow


@register("norm", "linalg_vector_norm", "native_norm", "_foreach_norm", "frobenius_norm", "linalg__powsum")
def _norm(c: Call) -> OpCost:
    order = c.arg("p", c.arg("ord", 2))
    n_in, n_out, t_in, t_out = _norm_counts(order)
    if c.base == "linalg__powsum":
        n_out = t_out = 0
    n = numel(c.at(0)) if c.base == "_foreach_norm" else first_numel(c.at(0))
    o = len(c.at(0)) if c.base == "_foreach_norm" else _outputs(c)
    # |z| is 4 real operations on a complex element, of which the square and one add replace the real square.
    factor = 2 if is_complex(c.at(0)) else 1
    return OpCost(n_in * n * factor + n_out * o, "reduction", transcendental=t_in * n + t_out * o)


@register("dist")
def _dist(c: Call) -> OpCost:
    n = max(first_numel(c.at(0)), first_numel(c.at(1)))
    n_in, n_out, t_in, t_out = _norm_counts(c.arg("p", 2))
    return OpCost((n_in + 1) * n + n_out, "reduction", transcendental=t_in * n + t_out)


@register("renorm")
def _renorm(c: Call) -> OpCost:
    n_in, n_out, t_in, t_out = _norm_counts(c.arg("p"))
    n, o = first_numel(c.at(0)), shape(c.at(0))[c.arg("dim")]
    # compare and maxnorm / (norm + eps) per slice; scale every element
    return OpCost((n_in + 1) * n + (n_out + 3) * o, "reduction", transcendental=t_in * n + t_out * o)


@register("trace")
def _trace(c: Call) -> OpCost:
    return OpCost(min(shape(c.at(0))), "reduction")


@register("cumsum", "cumprod", "cummax", "cummin", "_cummax_helper", "_cummin_helper")
def _scan(c: Call) -> OpCost:
    return OpCost(first_numel(c.at(0)) * (2 if is_complex(c.at(0)) else 1), "scan")


@register("logcumsumexp", "_logcumsumexp")
def _logcumsumexp(c: Call) -> OpCost:
    n = first_numel(c.at(0))
    return OpCost(7 * n, "scan", transcendental=2 * n)


@register("cumprod_backward")
def _cumprod_backward(c: Call) -> OpCost:
    # grad * output, reversed cumsum, divide by the input
    return OpCost(3 * first_numel(c.at(0)), "scan")


@register("cummaxmin_backward")
def _cummaxmin_backward(c: Call) -> OpCost:
    return OpCost(first_numel(c.at(0)), "indexing")  # scatter-add: one maximum may serve many outputs


@register("diff")
def _diff(c: Call) -> OpCost:
    return elementwise(c, max(int(c.arg("n", 1)), 1))


@register("segment_reduce")
def _segment_reduce(c: Call) -> OpCost:
    mean = c.arg("reduce") == "mean"
    return OpCost(first_numel(c.at(0)) + (first_numel(c.out) if mean else 0), "reduction")


@register("_segment_reduce_backward")
def _segment_reduce_backward(c: Call) -> OpCost:
    # mean divides, prod multiplies and divides, max and min compare and select; sum copies
    per = {"sum": 0, "mean": 1}.get(c.arg("reduce"), 2)
    return OpCost(per * first_numel(c.arg("data")), "reduction")


@register("cdist", "_cdist_forward", "_euclidean_dist")
def _cdist(c: Call) -> OpCost:
    """By definition, per pair and feature: subtract, then the norm's count; a root per pair."""
    pairs, width = numel(c.out), shape(c.at(0))[-1]
    return _distance(pairs, width, c.arg("p", 2))


def _distance(pairs: int, width: int, order: Any) -> OpCost:
    n_in, n_out, t_in, t_out = _norm_counts(order)
    flops = pairs * (width * (n_in + 1) + n_out)
    return OpCost(flops, "reduction", transcendental=pairs * (width * t_in + t_out))


@register("pdist", "_pdist_forward")
def _pdist(c: Call) -> OpCost:
    rows, width = shape(c.at(0))
    return _distance(rows * (rows - 1) // 2, width, c.arg("p", 2))


@register("_cdist_backward")
def _cdist_backward(c: Call) -> OpCost:
    """Per pair and feature: subtract, then 2-norm: * grad / dist, add 3; 1-norm: sign, * grad, add 3; else
    two pow more.
    """
    order, pairs, width = c.arg("p"), numel(c.arg("cdist")), shape(c.arg("x1"))[-1]
    extra = 0 if order in (1, 2, inf) else 2
    return OpCost(pairs * width * (4 + extra), "reduction", transcendental=pairs * width * extra)


@register("_pdist_backward")
def _pdist_backward(c: Call) -> OpCost:
    # As _cdist_backward, the gradient added to both ends of the pair.
    pairs, width, order = numel(c.arg("pdist")), shape(c.arg("self"))[-1], c.arg("p")
    extra = 0 if order in (1, 2, inf) else 2
    return OpCost(pairs * width * (5 + extra), "reduction", transcendental=pairs * width * extra)
