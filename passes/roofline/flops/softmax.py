"""Softmax and log-softmax, forward and backward, over n elements in r rows.

softmax 5n: max, subtract, exp, sum, divide. log_softmax 5n + r: max, subtract, exp, sum, log (r), subtract.
Their backwards 4n: multiply (log: exp), sum, multiply, subtract. Not here: attention, losses.
"""

from __future__ import annotations

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, shape


def _rows(c: Call) -> tuple[int, int]:
    x, dim = c.at(0), c.arg("dim")
    n, sizes = first_numel(x), shape(x)
    row = sizes[-1 if dim is None else dim] if sizes else 1
    return n, n // max(row, 1)


@register("softmax", "_softmax", "special_softmax")
def _softmax(c: Call) -> OpCost:
    n, _ = _rows(c)
    return OpCost(5 * n, "reduction", transcendental=n)


@register("_safe_softmax", "_masked_softmax")
def _masked(c: Call) -> OpCost:
    # One select more: rows (safe) or elements (masked) that are wholly masked are replaced.
    n, _ = _rows(c)
    return OpCost(6 * n, "reduction", transcendental=n)


@register("log_softmax", "_log_softmax", "special_log_softmax")
def _log_softmax(c: Call) -> OpCost:
    n, r = _rows(c)
    return OpCost(5 * n + r, "reduction", transcendental=n + r)


@register("_softmax_backward_data", "_masked_softmax_backward")
def _softmax_backward(c: Call) -> OpCost:
    return OpCost(4 * first_numel(c.at(0)), "reduction")


@register("_log_softmax_backward_data")
def _log_softmax_backward(c: Call) -> OpCost:
    n = first_numel(c.at(0))
    return OpCost(4 * n, "reduction", transcendental=n)


@register("prims::prepare_softmax_online")
def _online(c: Call) -> OpCost:
    # Row maximum and sum of exponentials: max, subtract, exp, add.
    n = first_numel(c.at(0))
    return OpCost(4 * n, "reduction", transcendental=n)
