"""The FX graph of ATen calls that an ONNX graph stands for: sizes only, on the meta device, never run.

The counting rules and the fusion model know ATen; expressed in it, an ONNX graph needs neither of its own. Here:
making nodes and remembering which ONNX op each belongs to. Not here: what an op expands to (rules/).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from optpass.passes.onnx_roofline.cost import combine, cost_of
from optpass.passes.onnx_roofline.value import DtypeMap, Size, Value

#: Overloads tried in this order for an op named without one.
_OVERLOADS = ("Tensor", "default")


def aten(name: str) -> Any:
    """The overload called `name`, e.g. "mul" (its tensor form) or "pow.Tensor_Scalar"."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name)
    if overload:
        return getattr(packet, overload)
    names = packet.overloads()
    return getattr(packet, next((n for n in _OVERLOADS if n in names), names[0]))


def meta_of(node: fx.Node) -> torch.Tensor:
    """The meta tensor that stands for the node's value."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def wrap(axis: int, rank: int) -> int:
    """A non-negative axis. Raises IndexError where the value has no such axis."""
    if not -rank <= axis < max(rank, 1):
        raise IndexError(f"axis {axis} of a value of rank {rank}")
    return axis % max(rank, 1)


def opaque(*inputs: object) -> None:
    """Target of a kernel that is no ATen op: an op without a rule, or several calls collapsed. Never called."""


class Builder:
    """Collects nodes; `owner` maps each call to the index of its ONNX op."""

    def __init__(self, dtypes: DtypeMap) -> None:
        self.graph = fx.Graph()
        self.dtypes = dtypes
        self.owner: dict[fx.Node, int] = {}
        self.current = -1
        self.mine: list[fx.Node] = []
        self.where: dict[str, Any] = {}

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> fx.Node:
        """A call whose result has the sizes of `out` (a meta tensor, a tuple of them, or None where not known)."""
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta.update(self.where)
        node.meta["val"] = out
        self.owner[node] = self.current
        self.mine.append(node)
        return node

    def begin(self, index: int, where: dict[str, Any]) -> None:
        """From here on calls belong to ONNX op `index`; `where` is FX metadata that names its source."""
        self.current, self.where, self.mine = index, where, []

    def emit(self, name: str, *args: Any, out: object, **kwargs: Any) -> fx.Node:
        """A call of the ATen op `name`."""
        return self.call(aten(name), args, kwargs, out)

    def parts(self, node: fx.Node) -> list[fx.Node]:
        """The results of a node that has several, those that are absent left out."""
        values = node.meta["val"]
        return [self.call(operator.getitem, (node, i), {}, v) for i, v in enumerate(values) if v is not None]

    def parts_or_none(self, node: fx.Node) -> list[fx.Node | None]:
        """The results of a node that has several, None for those that are absent."""
        values = node.meta["val"]
        return [None if v is None else self.call(operator.getitem, (node, i), {}, v) for i, v in enumerate(values)]

    def node_of(self, value: Value) -> fx.Node | None:
        """The node of a value; what no op made is an input of the graph. None for text and unknown sizes."""
        if value.node is None and value.shape is not None:
            meta = self.dtypes.meta(value.elem, value.shape)
            if meta is not None:
                value.node = self.graph.create_node("placeholder", "v", ())
                value.node.meta["val"] = meta
        return value.node

    def collapse(self, out: object) -> fx.Node:
        """All calls of the current op so far as one kernel of their cost; what lies between them stays inside."""
        inside = self.mine
        outside = [a for node in inside for a in node.all_input_nodes if self.owner.get(a) != self.current]
        cost = combine([cost_of(node) for node in inside])
        self.erase(inside)
        self.mine = []
        kernel = self.call(opaque, tuple(dict.fromkeys(outside)), {}, out)
        kernel.meta["cost"] = cost
        return kernel

    def erase(self, nodes: list[fx.Node]) -> None:
        """Take back calls, latest first; they must have no users outside the list."""
        for node in reversed(nodes):
            self.graph.erase_node(node)
            self.owner.pop(node, None)

    # ---- expressions of the same few shapes, used by all rules -------------------------------------------------

    def map(self, name: str, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> fx.Node:
        """An elementwise call: the result has the broadcast sizes of the arguments and the first one's dtype."""
        metas = [meta_of(a) for a in args if isinstance(a, fx.Node)]
        shape = np.broadcast_shapes(*(tuple(m.shape) for m in metas))
        return self.emit(name, *args, out=torch.empty(shape, dtype=dtype or metas[0].dtype, device="meta"), **kwargs)

    def reduce(
        self, name: str, x: fx.Node, dims: list[int], *rest: Any, keep: bool = True, first: tuple[Any, ...] = ()
    ) -> fx.Node:
        """A reduction over `dims`; `first` goes between the input and the dims."""
        meta = meta_of(x)
        wrapped = {wrap(d, meta.dim()) for d in dims} if meta.dim() else set()
        shape = [1 if d in wrapped else s for d, s in enumerate(meta.shape) if keep or d not in wrapped]
        out = torch.empty(shape, dtype=meta.dtype, device="meta")
        return self.emit(name, x, *first, sorted(wrapped), keep, *rest, out=out)

    def reshape(self, x: fx.Node, shape: Size) -> fx.Node:
        """A view if strides allow one, else a copy first, as `Tensor.reshape`."""
        meta = meta_of(x)
        try:
            out = meta.view(shape)
        except RuntimeError:
            x = self.emit("clone", x, out=torch.empty(meta.shape, dtype=meta.dtype, device="meta"))
            out = meta_of(x).view(shape)
        return self.emit("view", x, list(shape), out=out)

    def permute(self, x: fx.Node, order: list[int]) -> fx.Node:
        """A view with its dims in another order."""
        return self.emit("permute", x, order, out=meta_of(x).permute(order))

    def expand(self, x: fx.Node, shape: Size) -> fx.Node:
        """A view that repeats dims of size 1."""
        return self.emit("expand", x, list(shape), out=meta_of(x).expand(shape))

    def select(self, x: fx.Node, dim: int, index: int) -> fx.Node:
        """A view of one slice."""
        return self.emit("select.int", x, dim, index, out=meta_of(x).select(dim, index))

    def slice(self, x: fx.Node, dim: int, start: int, end: int, step: int = 1) -> fx.Node:
        """A view of a range of one dim; bounds as in Python, so large ones mean the end."""
        whole = [slice(None)] * meta_of(x).dim()
        whole[dim] = slice(start, end, step)
        return self.emit("slice.Tensor", x, wrap(dim, len(whole)), start, end, step, out=meta_of(x)[tuple(whole)])

    def zeros(self, shape: Size, dtype: torch.dtype) -> fx.Node:
        """A constant that costs nothing."""
        return self.emit("zeros", list(shape), out=torch.empty(shape, dtype=dtype, device="meta"))
