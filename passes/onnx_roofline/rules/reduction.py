"""Reductions, scans and softmax."""

from __future__ import annotations

from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of, wrap
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.registry import register

_SIMPLE = {"ReduceSum": "sum.dim_IntList", "ReduceMean": "mean.dim", "ReduceMax": "amax", "ReduceMin": "amin",
           "ReduceProd": "prod.dim_int", "ReduceLogSumExp": "logsumexp"}  # fmt: skip
_NORMS = {"ReduceL1": 1, "ReduceL2": 2}


def _axes(c: Call) -> list[int]:
    """Reduced axes; absent means all, or none where noop_with_empty_axes says so."""
    axes = c.ints(1, "axes")
    if axes is None and c.has(1):
        raise NotKnown("its axes are an input of the model")
    if axes:
        return axes
    return [] if c.attr("noop_with_empty_axes", 0) else list(range(meta_of(c.t(0)).dim()))


@register(*_SIMPLE, *_NORMS, "ReduceLogSum", "ReduceSumSquare")
def _reduce(c: Call) -> Result:
    x, axes, keep = c.t(0), _axes(c), bool(c.attr("keepdims", 1))
    if not axes and meta_of(x).dim():
        return _single(c, x)
    if c.op in _SIMPLE:
        return c.b.reduce(_SIMPLE[c.op], x, axes, keep=keep)
    if c.op in _NORMS:
        return c.b.reduce("linalg_vector_norm", x, axes, keep=keep, first=(_NORMS[c.op],))
    if c.op == "ReduceLogSum":
        return c.b.map("log", c.b.reduce("sum.dim_IntList", x, axes, keep=keep))
    return c.b.reduce("sum.dim_IntList", c.b.map("mul", x, x), axes, keep=keep)


def _single(c: Call, x: fx.Node) -> fx.Node:
    """A reduction over no axis: its map of a single element."""
    if c.op in ("ReduceL1", "ReduceL2"):
        return c.b.map("abs", x)
    if c.op == "ReduceLogSum":
        return c.b.map("log", x)
    if c.op == "ReduceSumSquare":
        return c.b.map("mul", x, x)
    return c.emit("alias", x, out=meta_of(x))


@register("ArgMax", "ArgMin")
def _arg(c: Call) -> Result:
    return c.emit(c.op.lower(), c.t(0), c.attr("axis", 0), bool(c.attr("keepdims", 1)))


@register("CumSum", "CumProd")
def _scan(c: Call) -> Result:
    axis = c.const(1)
    return c.emit(c.op.lower(), c.t(0), int(axis.reshape(-1)[0]) if axis is not None else 0)


def _softmax_dims(c: Call) -> list[int]:
    """Before opset 13 the axis starts a flattened row; since then it is the row."""
    rank = max(meta_of(c.t(0)).dim(), 1)
    axis = wrap(c.attr("axis", 1 if c.version < 13 and rank > 1 else -1), rank)
    return list(range(axis, rank)) if c.version < 13 else [axis]


@register("Softmax")
def _softmax(c: Call) -> Result:
    return softmax(c, c.t(0), _softmax_dims(c))


def softmax(c: Call, x: fx.Node, dims: list[int]) -> fx.Node:
    """max, subtract, exp, sum, divide: as Inductor decomposes it."""
    shifted = c.b.map("exp", c.b.map("sub", x, c.b.reduce("amax", x, dims)))
    return c.b.map("div", shifted, c.b.reduce("sum.dim_IntList", shifted, dims))


@register("LogSoftmax")
def _log_softmax(c: Call) -> Result:
    return log_softmax(c, c.t(0), _softmax_dims(c))


def log_softmax(c: Call, x: fx.Node, dims: list[int]) -> fx.Node:
    """max, subtract, exp, sum, log, subtract."""
    shifted = c.b.map("sub", x, c.b.reduce("amax", x, dims))
    total = c.b.reduce("sum.dim_IntList", c.b.map("exp", shifted), dims)
    return c.b.map("sub", shifted, c.b.map("log", total))


@register("Hardmax")
def _hardmax(c: Call) -> Result:
    """1 at the first maximum of each row: the maximum, then a comparison."""
    x = c.t(0)
    best = c.b.reduce("amax", x, _softmax_dims(c))
    return c.emit("eq", x, best)
