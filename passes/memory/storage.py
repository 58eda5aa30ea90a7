"""Which storage each value of an ATen graph lives in: views share their base's, everything else has its own.

Told from operator schemas, never from addresses: fake tensors of a traced graph need not share storages as the real
ones will. What nothing here knows is taken to allocate.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: Views that their schema does not declare.
_UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default})


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def view_base(node: fx.Node) -> fx.Node | None:
    """The argument whose storage `node`'s value shares without writing to it; None where it has its own."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not node.args:
        return None
    first = node.args[0]
    if not isinstance(first, fx.Node):
        return None
    if target in _UNDECLARED_VIEWS:
        return first
    schema = target._schema
    if not schema.arguments or not schema.returns:
        return None
    info = schema.arguments[0].alias_info
    shared = any(r.alias_info is not None for r in schema.returns)
    return first if info is not None and not info.is_write and shared else None


def written_argument(node: fx.Node) -> fx.Node | None:
    """The first argument that `node` writes to in place; None for functional operators."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                return value
    return None


def is_item(node: fx.Node) -> bool:
    """Whether `node` takes one element of a tuple of values."""
    return node.op == "call_function" and node.target is operator.getitem


def nbytes(value: Any, hint: Any, granularity: int = 1) -> int:
    """Bytes of the storage behind a fake tensor, rounded up to the allocator's `granularity`.

    Args:
        value: fake tensor, contiguous or not; the storage spans its largest index.
        hint: int for a symbolic size.
        granularity: 1 for the CPU, 512 for CUDA's caching allocator.
    """
    if not isinstance(value, torch.Tensor):
        return 0
    size = 1
    for extent, stride in zip(value.shape, value.stride(), strict=True) if value.layout == torch.strided else ():
        extent = hint(extent)
        if extent == 0:
            return 0
        size += (extent - 1) * hint(stride)
    if value.layout != torch.strided:
        size = hint(value.numel())
    bytes_ = size * value.element_size()
    return -(-bytes_ // granularity) * granularity
