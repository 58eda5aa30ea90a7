"""Elementwise ops: a count per output element, times the broadcast output's size.

Here: registration of the table, ops whose count depends on arguments, the rule for ops merely tagged
pointwise, and the _foreach_ forms. Not here: the table (pointwise_table.py), random numbers, casts and copies
(movement.py).
"""

from __future__ import annotations

from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.pointwise_table import COMPLEX, per_element
from optpass.passes.roofline.flops.registry import Call, register, words
from optpass.passes.roofline.flops.shapes import (
    broadcast_numel,
    first_numel,
    is_complex,
    is_tensor,
    numel,
    tensors,
)

_TABLE = per_element()


def outputs(c: Call) -> int:
    """Elements written: of the first output, or of the operands' broadcast where an in-place op returned
    nothing.
    """
    return first_numel(c.out) or broadcast_numel(list(c.args))


def elementwise(c: Call, flops: int, transcendental: int = 0, elements: int | None = None) -> OpCost:
    """`flops` per element; on complex operands the table's real count, or twice `flops`."""
    n = outputs(c) if elements is None else elements
    if is_complex(c.args):
        flops = COMPLEX.get(_base(c), 2 * flops)
    return OpCost(flops * n, "pointwise", transcendental=transcendental * n)


def _base(c: Call) -> str:
    return c.base.removeprefix("_foreach_")


def _from_table(c: Call) -> OpCost:
    if c.base == "where" and c.arg("other") is None:  # where(condition) is nonzero
        return OpCost(first_numel(c.at(0)), "indexing")
    flops, transcendental = _TABLE[c.base]
    return elementwise(c, flops, transcendental)


register(*(name for name in _TABLE))(_from_table)
register(*(f"prims::{name}" for name in _TABLE if not name.startswith(("special_", "_"))))(_from_table)


@register("rule::pointwise")
def _tagged(c: Call) -> OpCost:
    """An op that no rule names but that torch tags pointwise: one operation per output element."""
    return elementwise(c, 1)


@register("add", "sub", "rsub", "subtract", "prims::add", "prims::sub")
def _add(c: Call) -> OpCost:
    return elementwise(c, _add_flops(c))


def _add_flops(c: Call) -> int:
    return 1 if c.arg("alpha", 1) == 1 else 2


def _div_flops(c: Call) -> int:
    return 1 if c.arg("rounding_mode") is None else 2


@register("div", "divide", "prims::div")
def _div(c: Call) -> OpCost:
    return elementwise(c, _div_flops(c))


def _power(exponent: Any) -> tuple[int, int]:
    """pow by a constant: small integers multiply, halves take a root, 0 and 1 are a fill and a copy."""
    table = {
        0: (0, 0),
        1: (0, 0),
        2: (1, 0),
        3: (2, 0),
        4: (2, 0),
        -1: (1, 0),
        -2: (2, 0),
        0.5: (1, 1),
        -0.5: (1, 1),
    }
    return table.get(exponent, (1, 1)) if isinstance(exponent, int | float) else (1, 1)


@register("pow", "prims::pow")
def _pow(c: Call) -> OpCost:
    flops, transcendental = _power(c.arg("exponent", c.at(1)))
    return elementwise(c, flops, transcendental)


@register("addcmul", "addcdiv")
def _addc(c: Call) -> OpCost:
    # a + value * (b * c): the product with 1 is left out by every kernel.
    return elementwise(c, 2 if c.arg("value", 1) == 1 else 3)


@register("gelu")
def _gelu(c: Call) -> OpCost:
    """erf form 0.5 x * (1 + erf(x / sqrt 2)): 5. tanh form 0.5 x * (1 + tanh(k (x + 0.044715 x^3))): 9."""
    return elementwise(c, 9 if c.arg("approximate") == "tanh" else 5, 1)


@register("gelu_backward")
def _gelu_backward(c: Call) -> OpCost:
    """erf: cdf 4, pdf 4, grad * (cdf + x * pdf) 3. tanh: inner 5, tanh 1, left 1, right 1, derivatives 3 + 5,
    combine 2.

    tanh in full: x*x, *x, *c, +x, *k (5); tanh (1); 0.5x (1); 1 + t (1); 0.5 * right (1); 1 - t*t (2); k * (1
    + 3c x*x) (3, the square shared); left * that * that (2); (left' + right') * grad (2).
    """
    return elementwise(c, 18, 1) if c.arg("approximate") == "tanh" else elementwise(c, 11, 2)


@register("glu")
def _glu(c: Call) -> OpCost:
    return elementwise(c, 5, 1)  # sigmoid 4, multiply


@register("glu_backward")
def _glu_backward(c: Call) -> OpCost:
    # per pair: s = sigmoid 4; da = g * s; db = da * (1 - s) * a 3
    return elementwise(c, 8, 1, first_numel(c.at(0)))


@register("max", "min")
def _max_min(c: Call) -> OpCost:
    """max of two tensors is pointwise; over a dim or all, a reduction of n comparisons."""
    if is_tensor(c.at(1)):
        return elementwise(c, 1)
    return OpCost(first_numel(c.at(0)), "reduction")


@register("equal", "allclose")
def _equal(c: Call) -> OpCost:
    n = broadcast_numel(list(c.args))
    return OpCost((6 if c.base == "allclose" else 1) * n, "reduction")


# --- _foreach_: the same count for every tensor of the list -----------------------------------------------------

_FOREACH_TABLE = words("""
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal
round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc mul maximum minimum clamp_max clamp_min lerp
""")


@register(*(f"_foreach_{name}" for name in _FOREACH_TABLE))
def _foreach(c: Call) -> OpCost:
    flops, transcendental = _TABLE[_base(c)]
    return elementwise(c, flops, transcendental, numel(c.at(0)))


@register("_foreach_add", "_foreach_sub", "_foreach_div")
def _foreach_add(c: Call) -> OpCost:
    return elementwise(c, _add_flops(c), 0, numel(c.at(0)))


@register("_foreach_addcmul", "_foreach_addcdiv")
def _foreach_addc(c: Call) -> OpCost:
    """Each tensor may have its own scalar; they come as `value` or as `scalars` (a list, or a tensor: not
    known).
    """
    value = c.arg("value", c.arg("scalars", 1))
    lists = list(c.at(0))
    values = value if isinstance(value, list | tuple) else [value] * len(lists)
    flops = sum(
        (2 if isinstance(v, int | float) and v == 1 else 3) * numel(t) for v, t in zip(values, lists, strict=True)
    )
    return OpCost(flops * (2 if is_complex(lists) else 1), "pointwise")


@register("_foreach_pow")
def _foreach_pow(c: Call) -> OpCost:
    exponent = c.arg("exponent", c.at(1))
    base = numel(c.at(0)) or numel(c.at(1))  # ScalarAndTensor: the list is the exponent
    if isinstance(exponent, list | tuple) and not any(True for _ in tensors(exponent)):
        pairs = [(_power(e), numel(t)) for e, t in zip(exponent, c.at(0), strict=True)]
        return OpCost(sum(f * n for (f, _), n in pairs), "pointwise", transcendental=sum(t * n for (_, t), n in pairs))
    flops, transcendental = _power(exponent)
    return elementwise(c, flops, transcendental, base)


@register("_foreach_max", "_foreach_powsum")
def _foreach_reduce(c: Call) -> OpCost:
    n = numel(c.at(0))
    return OpCost((1 if c.base == "_foreach_max" else 3) * n, "reduction")


@register("prims::inductor_cvt_e8m0_rceil")
def _to_e8m0(c: Call) -> OpCost:
    return elementwise(c, 3)  # on the bit pattern: add the rounding constant, shift, clamp
