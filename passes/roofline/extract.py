"""From ATen graphs to ops with FLOPs and bytes, each op as if it were a kernel of its own.

Sizes come from `meta["val"]`; symbolic ones are replaced by their hints, so nothing here adds a guard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optpass.passes.contract import AtenGraph
from optpass.passes.roofline.flops import OpCost, op_cost
from optpass.passes.roofline.program import OpInfo
from optpass.passes.source import is_backward, locate
from optpass.passes.wrappers import plain_tensors
from optpass.reporting.model import Phase

_DTYPE_LETTERS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor as the formulas need it: ints only.

    `shape`, `dtype` and `stride()` are those of the tensor, in elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    device: torch.device

    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Like `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        """Like `Tensor.stride`."""
        return self.strides if dim is None else self.strides[dim]

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        for word, letter in _DTYPE_LETTERS.items():
            if name.startswith(word) and name[len(word) :].isdigit():
                name = letter + name[len(word) :]
        return f"{name}{list(self.shape)}"


def concrete(value: Any, hint: Callable[[Any], int]) -> Any:
    """Tensors as `Shape`, symbols as ints, containers deeply; everything else as it is. Of a tensor that stands for
    others, the first of these: a DTensor's shard, the values of a nested tensor."""
    if isinstance(value, torch.Tensor):
        value = next(iter(plain_tensors(value)), value)
        strides = tuple(hint(s) for s in value.stride()) if value.layout == torch.strided else ()
        return Shape(tuple(hint(s) for s in value.shape), value.dtype, strides, value.device)
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return 1.0
    if isinstance(value, (list, tuple)):
        return tuple(concrete(v, hint) for v in value)
    if isinstance(value, dict):
        return {k: concrete(v, hint) for k, v in value.items()}
    return value


def tensors(value: Any) -> list[Shape]:
    """Every `Shape` in a nested value, in order."""
    if isinstance(value, Shape):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    if isinstance(value, dict):
        return tensors(tuple(value.values()))
    return []


class Extractor:
    """Costs and bytes of the nodes of one ATen graph.

    Args:
        aten: the graph.
        hint: int for a symbolic size.
    """

    def __init__(self, aten: AtenGraph, hint: Callable[[Any], int]) -> None:
        self.phase: Phase = aten.phase
        self.graph = aten.graph
        self.values: dict[fx.Node, Any] = {}
        for node in aten.graph.nodes:
            self.values[node] = concrete(node.meta.get("val"), hint)
        self._hint = hint

    def arguments(self, node: fx.Node) -> tuple[Any, Any]:
        """The node's arguments with shapes in place of nodes."""
        load = self.values.__getitem__
        args = fx.node.map_arg(node.args, load)
        kwargs = fx.node.map_arg(node.kwargs, load)
        return concrete(args, self._hint), concrete(dict(kwargs), self._hint)

    def op(self, node: fx.Node) -> OpInfo:
        """The op that `node` is, with its cost alone."""
        args, kwargs = self.arguments(node)
        out = self.values[node]
        cost = op_cost(node.target, args, kwargs, out)
        inputs, outputs = _distinct(node, self.values), tensors(out)
        source = locate(node)
        moves = cost is None or cost.kind not in ("view",)
        dtype = _compute_dtype(cost, inputs, outputs)
        return OpInfo(
            name=node.name,
            target=target_name(node.target),
            phase=self.phase,
            file=source.file,
            line=source.line,
            module=source.module,
            cost=cost,
            reads=_read_bytes(node, cost, inputs, outputs) if moves else 0,
            writes=sum(t.nbytes for t in outputs) if moves else 0,
            dtype=str(dtype).removeprefix("torch.") if dtype is not None else "",
            shape=", ".join(str(t) for t in outputs),
            recomputed=self.phase == "backward" and not is_backward(node),
        )


def target_name(target: object) -> str:
    """`aten.mm.default`, `prims.iota.default`, `flex_attention`, `getitem`."""
    text = str(target)
    return text if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", text)


def _distinct(node: fx.Node, values: dict[fx.Node, Any]) -> list[Shape]:
    """Input tensors, a tensor that is used twice counted once."""
    return [t for a in node.all_input_nodes for t in tensors(values[a])]


def _read_bytes(node: fx.Node, cost: OpCost | None, inputs: list[Shape], outputs: list[Shape]) -> int:
    """Bytes read: all inputs, except that a gather reads what it gathers and an expanded tensor what it stores."""
    total = 0
    written = sum(t.numel() for t in outputs)
    for index, value in enumerate(inputs):
        stored = value.nbytes
        if value.strides:
            kept = [size for size, stride in zip(value.shape, value.strides, strict=True) if stride != 0]
            stored = min(stored, _product(kept) * value.element_size())
        if cost is not None and cost.kind == "indexing" and index == 0:
            stored = min(stored, written * value.element_size())
        total += stored
    return total


def _product(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _compute_dtype(cost: OpCost | None, inputs: list[Shape], outputs: list[Shape]) -> torch.dtype | None:
    """The dtype whose peak bounds the op: that of the operands of a matmul, else of the widest floating result."""
    pool = inputs if cost is not None and cost.mnk is not None else [*outputs, *inputs]
    floating = [t.dtype for t in pool if t.dtype.is_floating_point or t.dtype.is_complex]
    if floating:
        return floating[0]
    return pool[0].dtype if pool else None
