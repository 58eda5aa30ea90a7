"""Sorting and selection: n log2 n comparisons per sorted row of n (the information-theoretic leading order).

top-k, k-th value, median, mode and unique are counted by the same rule: they sort on GPUs, and no tighter
count holds for all backends. Searches count log2 of the searched length. Not here: max and argmax
(reductions).
"""

from __future__ import annotations

from math import log2, prod

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, shape


def sort_cost(elements: int, row: int) -> OpCost:
    flops = elements * log2(row) if row > 1 else 0.0
    return OpCost(int(flops) if flops == int(flops) else flops, "sort")


@register("sort", "msort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode")
def _sort(c: Call) -> OpCost:
    x = c.at(0)
    sizes, n = shape(x), first_numel(x)
    if not sizes:
        return OpCost(0, "sort")
    over_all = c.base in ("median", "nanmedian") and "dim" not in c.names
    dim = 0 if c.base == "msort" else c.arg("dim", -1)
    return sort_cost(n, n if over_all else sizes[dim])


@register("_unique", "_unique2", "unique_dim")
def _unique(c: Call) -> OpCost:
    n = first_numel(c.at(0))
    row = shape(c.at(0))[c.arg("dim")] if c.base == "unique_dim" else n
    # Sort, then compare neighbours.
    return OpCost(sort_cost(n, row).flops + n, "sort")


@register("unique_consecutive", "unique_dim_consecutive")
def _consecutive(c: Call) -> OpCost:
    return OpCost(first_numel(c.at(0)), "scan")


@register("searchsorted", "bucketize")
def _search(c: Call) -> OpCost:
    table, queries = (c.at(0), c.at(1)) if c.base == "searchsorted" else (c.at(1), c.at(0))
    length, n = shape(table)[-1], first_numel(queries) or 1
    return OpCost(sort_cost(n, length).flops, "sort")


@register("histogram")
def _histogram(c: Call) -> OpCost:
    # Edges given: a binary search and an increment per element. Equal bins: subtract, scale, two compares, increment.
    n, edges = first_numel(c.at(0)), c.at(1)
    if hasattr(edges, "shape"):
        return OpCost(sort_cost(n, shape(edges)[-1]).flops + n, "sort")
    return OpCost(5 * n, "indexing")


@register("isin")
def _isin(c: Call) -> OpCost:
    # Sort both sides joined (the large-input path of ATen), compare neighbours.
    n = prod(shape(c.at(0))) if hasattr(c.at(0), "shape") else 1
    m = prod(shape(c.at(1))) if hasattr(c.at(1), "shape") else 1
    return OpCost(sort_cost(n + m, n + m).flops + n + m, "sort")
