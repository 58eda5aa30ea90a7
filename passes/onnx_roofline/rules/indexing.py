"""Gathers, scatters, selections and sorts."""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of, wrap
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.registry import register


@register("Gather")
def _gather(c: Call) -> Result:
    """By a known scalar a view of one slice, of a table's rows an embedding, else index_select."""
    x, axis, index = c.t(0), c.attr("axis", 0), c.const(1)
    rank = meta_of(x).dim()
    axis = wrap(axis, rank)
    size = meta_of(x).shape[axis]
    if index is not None and index.shape == () and size > 0:
        return c.b.select(x, axis, min(max(int(index), -size), size - 1))
    if axis == 0 and rank == 2:
        return c.emit("embedding", x, c.t(1))
    return c.emit("index_select", x, axis, c.t(1))


@register("GatherElements")
def _gather_elements(c: Call) -> Result:
    return c.emit("gather", c.t(0), c.attr("axis", 0), c.t(1))


@register("GatherND")
def _gather_nd(c: Call) -> Result:
    return c.emit("index.Tensor", c.t(0), [c.t(1)])


def _target(c: Call) -> fx.Node:
    """What is scattered into: it has the sizes of the result."""
    x = c.t(0)
    if meta_of(x).shape != c.out().shape:
        raise NotKnown(f"a result {list(c.out().shape)} does not fit its first input {list(meta_of(x).shape)}")
    return x


@register("Scatter", "ScatterElements")
def _scatter(c: Call) -> Result:
    x, index, source, axis = _target(c), c.t(1), c.t(2), c.attr("axis", 0)
    reduction = c.attr("reduction", "none")
    if reduction == "none":
        return c.emit("scatter.src", x, axis, index, source)
    if reduction == "add":
        return c.emit("scatter_add", x, axis, index, source)
    return c.emit("scatter_reduce.two", x, axis, index, source, reduction)


@register("ScatterND")
def _scatter_nd(c: Call) -> Result:
    """Rows at coordinates; where it accumulates, one operation per element of the updates."""
    x, index, source = _target(c), c.t(1), c.t(2)
    if c.attr("reduction", "none") == "none":
        return c.emit("index_put", x, [index], source)
    return c.emit("scatter_reduce.two", x, 0, source, source, c.attr("reduction"))


@register("TensorScatter")
def _tensor_scatter(c: Call) -> Result:
    return c.emit("slice_scatter", _target(c), c.t(1), c.attr("axis", -2))


@register("OneHot")
def _one_hot(c: Call) -> Result:
    return c.emit("one_hot", c.t(0))


@register("NonZero")
def _nonzero(c: Call) -> Result:
    return c.emit("nonzero", c.t(0))


@register("Compress")
def _compress(c: Call) -> Result:
    """The places where the condition holds, then a gather of them."""
    condition = c.t(1)
    places = torch.empty(meta_of(condition).shape, dtype=torch.int64, device="meta")
    return c.emit("index_select", c.t(0), c.attr("axis", 0), c.emit("nonzero", condition, out=places))


@register("Unique")
def _unique(c: Call) -> Result:
    axis = c.attr("axis")
    outs = c.outs()
    if axis is None:
        return c.b.parts_or_none(c.emit("_unique2", c.t(0), out=outs))
    return c.b.parts_or_none(c.emit("unique_dim", c.t(0), axis, out=outs))


@register("TopK")
def _topk(c: Call) -> Result:
    return c.b.parts_or_none(c.emit("topk", c.t(0), 1, c.attr("axis", -1), out=c.outs()))
