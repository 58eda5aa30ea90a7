"""Einstein summation, where it reaches the graph undecomposed (pre-dispatch graphs, torch-level targets).

Here: parsing the equation and counting pairwise contractions. Not here: plain matrix products (matmul.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import mac_factor, shape, tensors


def _parse(equation: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str, dict[str, int]]:
    """Terms, output term and the size of each index; an ellipsis becomes digits, right-aligned."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    raw = left.split(",")
    widths = [len(s) - len(t.replace("...", "")) if "..." in t else 0 for t, s in zip(raw, shapes, strict=True)]
    names = "0123456789"[: max(widths, default=0)]
    terms = [t.replace("...", names[len(names) - w :]) for t, w in zip(raw, widths, strict=True)]
    if arrow:
        output = right.replace("...", names)
    else:
        letters = sorted(x for x in set("".join(terms)) - set(names) if "".join(terms).count(x) == 1)
        output = names + "".join(letters)
    sizes: dict[str, int] = {}
    for term, sizes_of in zip(terms, shapes, strict=True):
        for index, size in zip(term, sizes_of, strict=True):
            sizes[index] = size if sizes.get(index, 1) == 1 else sizes[index]
    return terms, output, sizes


def _pair(a: str, b: str, kept: set[str], sizes: dict[str, int]) -> tuple[str, OpCost]:
    """One contraction of terms `a` and `b` to the indices in `kept`."""
    joint = "".join(dict.fromkeys(a + b))
    result = "".join(x for x in joint if x in kept)
    total = prod(sizes[x] for x in joint)
    if len(result) == len(joint):  # nothing is summed: an outer or elementwise product
        return result, OpCost(total, "pointwise")
    batch = prod(sizes[x] for x in result if x in a and x in b)
    m = prod(sizes[x] for x in result if x in a and x not in b)
    n = prod(sizes[x] for x in result if x in b and x not in a)
    k = prod(sizes[x] for x in joint if x not in kept)
    return result, OpCost(2 * total, "matmul", (m, n, k), batch)


def _order(path: Sequence[int] | None, count: int) -> list[tuple[int, int]]:
    """Positions contracted at each step; ATen goes from left to right unless `path` says otherwise."""
    if path:
        return list(zip(path[::2], path[1::2], strict=True))
    return [(0, 1)] * (count - 1)


@register("einsum")
def einsum(c: Call) -> OpCost:
    """Sum over pairwise contractions in ATen's order; 2 per joint index, 1 where nothing is summed."""
    operands: list[Any] = list(tensors(c.args[1:] or c.kwargs.get("tensors")))
    equation = c.args[0] if c.args else c.kwargs["equation"]
    terms, output, sizes = _parse(equation, [shape(t) for t in operands])
    factor = mac_factor(operands)
    if len(terms) == 1:
        summed = set(terms[0]) - set(output)
        flops = prod(sizes[x] for x in set(terms[0])) if summed else 0
        return OpCost(flops, "reduction" if summed else "view")
    costs: list[OpCost] = []
    for i, j in _order(c.kwargs.get("path"), len(terms)):
        i, j = min(i, j), max(i, j)
        b, a = terms.pop(j), terms.pop(i)
        kept = set(output).union(*terms)
        result, cost = _pair(a, b, kept, sizes)
        costs.append(cost)
        # ATen puts the result where the path's convention (opt_einsum) does: last; left to right: first.
        terms.insert(0 if not c.kwargs.get("path") else len(terms), result)
    main = max(costs, key=lambda x: x.flops)
    return OpCost(factor * sum(x.flops for x in costs), main.kind, main.mnk, main.batch)
