"""Gradients are added up without a third tensor of their size, where that can be had.

Gradients that are scattered into zeros only to be added to another one are scattered into that one.

An embedding that is used twice (a tied head) gets two gradients of its size, of which one is mostly zeros; where the
last kernels of a step hold both, they set its peak. The sum is taken in another order, so that results differ by
rounding: for compilers that reorder sums anyway, and in dtypes that do not lose many small terms to a large one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_WIDE = (torch.float32, torch.float64)


def accumulate_in_place(joint: fx.GraphModule) -> int:
    """Rewrite `add(gradient, scatter(zeros, ...))` to `scatter(gradient, ...)`, in place; how many there were."""
    found = 0
    for node in joint.graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
        if len(node.args) != 2 or node.kwargs:
            continue
        for other, scattered in (node.args, node.args[::-1]):
            if _may_take(other, node) and _scatters_into_zeros(scattered, node):
                _rewritten(joint.graph, node, other, scattered)
                found += 1
                break
    if found:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return found


def own_gradients(backward: fx.GraphModule) -> int:
    """Return views as tensors of their own, on the same storage; how many there were."""
    (output,) = backward.graph.find_nodes(op="output")
    views = [n for n in output.all_input_nodes if _is_view(n)]
    for view in views:
        with backward.graph.inserting_after(view):
            own = backward.graph.call_function(_ATEN.detach.default, (view,))
        own.meta.update(view.meta)
        output.replace_input_with(view, own)
    if views:
        backward.recompile()
    return len(views)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


def _may_take(value: Any, reader: fx.Node) -> bool:
    """Whether nobody else reads `value`, a result of the graph that is laid out as the sum."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or set(value.users) != {reader}:
        return False
    schema = getattr(value.target, "_schema", None)
    if schema is None or any(r.alias_info is not None for r in schema.returns):
        return False  # of a view, the base may be read elsewhere
    gradient = value.meta.get("val")
    return _same(gradient, reader.meta.get("val")) and getattr(gradient, "dtype", None) in _WIDE


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    return _described(one) == _described(other)


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Its metadata; sizes as text, since to compare symbols is to guard on them."""
    return tuple(map(str, tensor.shape)), tuple(map(str, tensor.stride())), tensor.dtype, tensor.device


def _scatters_into_zeros(value: Any, reader: fx.Node) -> bool:
    if not isinstance(value, fx.Node) or value.op != "call_function" or set(value.users) != {reader}:
        return False
    if not _same(value.meta.get("val"), reader.meta.get("val")) or not _adds_up(value):
        return False
    zeros = value.args[0]
    return isinstance(zeros, fx.Node) and zeros.target is _ATEN.full.default and bool(zeros.args[1] == 0)


def _adds_up(node: fx.Node) -> bool:
    """Whether the node adds values at indices to a copy of its first argument."""
    if node.target is _ATEN._unsafe_masked_index_put_accumulate.default:
        return not node.kwargs
    if node.target in (_ATEN.index_put.default, _ATEN._unsafe_index_put.default):
        return not node.kwargs and len(node.args) == 4 and node.args[3] is True
    return False


def _rewritten(graph: fx.Graph, add: fx.Node, other: fx.Node, scattered: fx.Node) -> None:
    target: Any = scattered.target
    with graph.inserting_before(add):
        new = graph.call_function(target, (other, *scattered.args[1:]), dict(scattered.kwargs))
    new.meta.update(scattered.meta)
    new.meta["val"] = add.meta["val"]
    add.replace_all_uses_with(new)
    graph.erase_node(add)
    graph.erase_node(scattered)
