"""Gathers, scatters, embeddings and their backwards: a gather is free, an accumulating scatter adds once per
element.

Address arithmetic is not counted. Not here: views and plain copies (movement.py), sorting.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import broadcast_numel, first_numel, is_complex, numel, shape


def _adds(n: int, value: Any, per: int = 1) -> OpCost:
    return OpCost(per * n * (2 if is_complex(value) else 1), "indexing")


@register(
    "gather",
    "index",
    "_unsafe_index",
    "index_select",
    "take",
    "take_along_dim",
    "embedding",
    "index_copy",
    "index_fill",
    "one_hot",
    "value_selecting_reduction_backward",
    "prims::inductor_lookup_seed",
    "embedding_sparse_backward",
    "_embedding_bag_sparse_backward",
    "_gather_sparse_backward",
)
def _gather(c: Call) -> OpCost:
    return OpCost(0, "indexing")


@register("_unsafe_masked_index")
def _masked_gather(c: Call) -> OpCost:
    return OpCost(numel(c.out), "indexing")  # a select between the gathered value and the fill


def indexed_numel(self: Any, indices: Any) -> int:
    """Elements that `self[indices]` addresses: the broadcast of the indices times the dims not indexed."""
    used = [i for i in indices if i is not None]
    sizes = shape(self)
    if any("bool" in str(i.dtype) for i in used):
        return prod(sizes)  # how many a mask selects is data: the most it can
    kept = [s for d, s in enumerate(sizes) if d >= len(indices) or indices[d] is None]
    return broadcast_numel(used) * prod(kept)


@register("index_put", "_unsafe_index_put", "_index_put_impl", "prims::_unsafe_index_put_")
def _index_put(c: Call) -> OpCost:
    n = indexed_numel(c.at(0), c.at(1)) if c.arg("accumulate") else 0
    return _adds(n, c.at(0))


@register("_unsafe_masked_index_put_accumulate")
def _masked_index_put(c: Call) -> OpCost:
    return _adds(first_numel(c.arg("values")), c.at(0), 2)  # select, add


@register("put")
def _put(c: Call) -> OpCost:
    return _adds(first_numel(c.arg("source")) if c.arg("accumulate") else 0, c.at(0))


@register("scatter")
def _scatter(c: Call) -> OpCost:
    return _adds(first_numel(c.arg("index")) if c.arg("reduce") else 0, c.at(0))


@register("scatter_add")
def _scatter_add(c: Call) -> OpCost:
    return _adds(first_numel(c.arg("index")), c.at(0))


@register("scatter_reduce", "index_reduce")
def _scatter_reduce(c: Call) -> OpCost:
    """One operation per source element; the mean counts its terms (1 more) and divides every output."""
    source = c.arg("index") if c.base == "scatter_reduce" else c.arg("source")
    n, mean = first_numel(source), c.arg("reduce") == "mean"
    return _adds(n * (2 if mean else 1) + (first_numel(c.at(0)) if mean else 0), c.at(0))


@register("index_add")
def _index_add(c: Call) -> OpCost:
    return _adds(first_numel(c.arg("source")), c.at(0), 1 if c.arg("alpha", 1) == 1 else 2)


@register("index_select_backward", "gather_backward", "masked_select_backward", "masked_scatter_backward")
def _gather_backward(c: Call) -> OpCost:
    return _adds(first_numel(c.at(0)), c.at(0))


@register("embedding_dense_backward", "embedding_backward")
def _embedding_backward(c: Call) -> OpCost:
    """One add per gradient element; scaling by frequency counts the indices and divides."""
    n = first_numel(c.at(0))
    extra = n + first_numel(c.at(1)) if c.arg("scale_grad_by_freq") else 0
    return _adds(n + extra, c.at(0))


@register("embedding_renorm")
def _embedding_renorm(c: Call) -> OpCost:
    n = first_numel(c.at(1)) * shape(c.at(0))[-1]
    rows = first_numel(c.at(1))
    return OpCost(3 * n + 4 * rows, "indexing", transcendental=rows)  # 2-norm 2n + r, compare, scale


_SUM, _MEAN, _MAX = 0, 1, 2


@register("_embedding_bag", "embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(c: Call) -> OpCost:
    """Per (index, feature): add (sum, mean) or compare (max), times its weight if any; the mean divides per
    bag.
    """
    width = shape(c.at(0))[-1]
    n = first_numel(c.at(1)) * width
    per = 1 + (c.arg("per_sample_weights") is not None)
    mean = first_numel(c.out) if c.arg("mode", _SUM) == _MEAN else 0
    return OpCost(per * n + mean, "reduction")


@register("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(c: Call) -> OpCost:
    """Per (index, feature): one add, a divide for the mean, a product for weights. Max: one add per bag and
    feature.
    """
    grad, mode = c.at(0), c.arg("mode", _SUM)
    if mode == _MAX:
        return OpCost(first_numel(grad), "indexing")
    n = first_numel(c.at(1)) * shape(grad)[-1]
    per = 1 + (mode == _MEAN) + (c.arg("per_sample_weights") is not None) + bool(c.arg("scale_grad_by_freq"))
    return OpCost(per * n, "indexing")


@register("_embedding_bag_per_sample_weights_backward")
def _bag_weights_backward(c: Call) -> OpCost:
    return OpCost(2 * first_numel(c.arg("indices")) * shape(c.at(0))[-1], "reduction")  # a dot per index


@register("nonzero", "nonzero_static", "nonzero_numpy", "argwhere", "masked_select", "masked_scatter")
def _compaction(c: Call) -> OpCost:
    # A running count of the mask: one test and add per element, counted as 1.
    return OpCost(broadcast_numel(list(c.args)), "scan")


@register("bincount", "histc")
def _histogram(c: Call) -> OpCost:
    # histc finds the bin by a subtract, a multiply and two compares.
    return OpCost(first_numel(c.at(0)) * (1 if c.base == "bincount" else 5), "indexing")


@register("col2im", "unfold_backward")
def _fold(c: Call) -> OpCost:
    return _adds(first_numel(c.at(0)), c.at(0))


@register(
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
)
def _pad_backward(c: Call) -> OpCost:
    return _adds(first_numel(c.at(0)), c.at(0))


@register("trace_backward")
def _trace_backward(c: Call) -> OpCost:
    return OpCost(0, "indexing")


@register("repeat_interleave")
def _repeat_interleave(c: Call) -> OpCost:
    # The form with one tensor makes the indices: a running sum of the repeats.
    scan = first_numel(c.at(0)) if c.overload == "Tensor" else 0
    return OpCost(scan, "scan" if scan else "indexing")
