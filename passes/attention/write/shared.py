"""What several sites compute alike is computed once: the mask of 24 layers is built and examined once per step.

Works on nodes that were written for sites, after all of them stand. They read nothing that is written to after it was
made (`emit.Writer.value` sees to that), so the same call of the same arguments gives the same numbers anywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import fx

from optpass.passes.attention.find.operands import PRODUCTS
from optpass.passes.attention.program.ir import Program, Value
from optpass.passes.attention.write.emit import Writer

#: Functions, and methods by name, that depend on their arguments alone. Kernels are not among these: they may draw
#: random numbers.
_PURE = frozenset(
    {
        torch.abs, torch.add, torch.all, torch.amax, torch.any, torch.clamp, torch.div, torch.eq, torch.full, torch.ge,
        torch.gt, torch.isinf, torch.le, torch.logical_and, torch.logical_not, torch.logical_or, torch.mul,
        torch.narrow, torch.permute, torch.reshape, torch.sub, torch.where,
        "detach", "expand", "to",
        operator.add, operator.floordiv, operator.mul, operator.pow, operator.truediv,
    }
)  # fmt: skip

#: Those that may return memory of their argument.
_VIEWS = frozenset(
    {
        torch.reshape,
        torch.permute,
        torch.narrow,
        "detach",
        "expand",
        "to",
        operator.getitem,
    }
)


def share(graph: fx.Graph, program: Program, writers: Iterable[Writer]) -> int:
    """Replace what was written twice by what was written first; returns how many nodes went.

    What the user computes twice from the same tensors counts as one. The grad mode and the autocast state of the place
    count as arguments. Where `torch.func` is at work nothing is shared, for a tensor made inside of one of its levels
    means nothing outside.
    """
    if any("functorch" in str(getattr(node.target, "__module__", "")) for node in graph.nodes):
        return 0
    states = {node: (w.like.grad, w.like.autocast) for w in writers for node in w.added}
    seen = _seen(graph, states)
    alike = _alike(program)
    first: dict[Any, fx.Node] = {}
    gone = 0
    for node in list(graph.nodes):
        if node not in states or node in seen or not _pure(node):
            continue
        key = (states[node], node.target, _key(node.args, alike), _key(node.kwargs, alike))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            gone += 1
    return gone


def _seen(graph: fx.Graph, own: Container[fx.Node]) -> set[fx.Node]:
    """Of `own`, what nodes of the user's are given, as it is or as a view: they may write to it."""
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in own and any(u not in own or (u in seen and _views(u)) for u in node.users):
            seen.add(node)
    return seen


def _views(node: fx.Node) -> bool:
    """May return memory of its argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(returned.alias_info is not None for returned in node.target._schema.returns)
    return node.target in _VIEWS


def _alike(program: Program) -> dict[object, Value]:
    """For each value and each node that returns one, the first value that is computed alike of the same leaves."""
    found: dict[object, Value] = {}
    first: dict[Any, Value] = {}
    for value in program.values:
        plain = value.op is not None and _repeats(value.op) and value.storage not in program.writes
        if plain and value.name not in PRODUCTS:
            key = (value.op, value.index, value.grad, value.autocast, _key(value.args, found))
            found[value] = first.setdefault(key, value)
    for node, returned in program.of_node.items():
        if isinstance(returned, Value):
            found[node] = found.get(returned, returned)
    return found


def _pure(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return _repeats(node.target)
    return node.op in ("call_function", "call_method") and node.target in _PURE


def _repeats(op: torch._ops.OpOverload) -> bool:
    """Gives the same for the same."""
    return op.namespace == "aten" and torch.Tag.nondeterministic_seeded not in op.tags and not op._schema.is_mutable


def _key(item: Any, alike: dict[object, Value]) -> Any:
    """Hashable, and the same only for the same: 1, 1.0 and True are equal, and make different tensors."""
    if isinstance(item, (fx.Node, Value)):
        return alike.get(item, item)
    if isinstance(item, (tuple, list)):
        return tuple(_key(i, alike) for i in item)
    if isinstance(item, dict):
        return tuple((name, _key(value, alike)) for name, value in item.items())
    return type(item), repr(item)
