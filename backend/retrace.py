"""What Dynamo writes into a graph and cannot read out of one: written so that it can.

A graph that is compiled again (for other sizes, for a step as it was seen) is traced by Dynamo like any callable. The
operator that stands for a `torch.autograd.Function` is one that it makes and does not take, and so is what it calls
for `tensor.data`: the graph would break there, and what lies around it would be planned in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from optpass.backend import snapshot

#: Named in the graph, not looked up: a torch without it makes none.
OPERATOR = "autograd_function_apply"
#: What Dynamo calls for `tensor.data`.
DATA = "_get_data_attr"
#: What says how the operator is to be differentiated, as torch 2.13 has it; with other settings it is left as it is.
SETTINGS = frozenset({"non_differentiable_idx", "saved_for_backward_idx", "dirty_idx"})


def retraceable(given: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph, and of those inside of it, with a `torch.autograd.Function` in place of each operator that
    stands for one, and `tensor.data` as it is written; `given` itself where there is none of either."""
    inside = {name: retraceable(child) for name, child in given.named_children() if isinstance(child, fx.GraphModule)}
    changed = {name: child for name, child in inside.items() if child is not getattr(given, name)}
    if not changed and not any(_stands_for_one(node) or _is_data(node) for node in given.graph.nodes):
        return given
    module = fx.GraphModule(given, snapshot.copy_graph(given.graph, keep=True))
    for name, child in changed.items():
        setattr(module, name, child)
    for node in filter(_is_data, module.graph.nodes):
        node.target, node.args = getattr, (node.args[0], "data")
    for node in filter(_stands_for_one, list(module.graph.nodes)):
        forward, backward = (getattr(module, part.target) for part in node.args[:2])
        node.target = _function(forward, backward, **node.kwargs)
        node.args, node.kwargs = node.args[2:], {}
    module.recompile()
    return module


def _is_data(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == DATA and len(node.args) == 1


def _stands_for_one(node: fx.Node) -> bool:
    is_one = isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.__name__ == OPERATOR
    return is_one and "saved_for_backward_idx" in node.kwargs and node.kwargs.keys() <= SETTINGS


def _function(
    forward_body: Callable[..., Any],
    backward_body: Callable[..., Any],
    saved_for_backward_idx: Collection[int],
    non_differentiable_idx: Collection[int] = (),
    dirty_idx: Collection[int] = (),
) -> Callable[..., Any]:
    """What calls the two bodies as the operator does: the first gives the outputs and what is saved, the second takes
    the gradients and what was saved. By position: which of what is saved the user's `ctx.save_for_backward` was given,
    which outputs are not differentiable, and which were written to."""
    checked, unchanged, dirty = tuple(saved_for_backward_idx), tuple(non_differentiable_idx), tuple(dirty_idx)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs, saved = forward_body(*args)
            ctx.save_for_backward(*_at(saved, checked))
            ctx.others = _not_at(saved, checked)
            if dirty:
                ctx.mark_dirty(*_at(_listed(outputs), dirty))
            if unchanged:
                ctx.mark_non_differentiable(*_at(_listed(outputs), unchanged))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward_body(*gradients, *_merged(ctx.saved_tensors, ctx.others, checked))

    def again(*args: Any) -> Any:
        return Again.apply(*args)  # type: ignore[no-untyped-call, unused-ignore]

    return again


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _at(values: Iterable[Any], positions: Collection[int]) -> list[Any]:
    return [value for i, value in enumerate(values) if i in positions]


def _not_at(values: Iterable[Any], positions: Collection[int]) -> list[Any]:
    return [value for i, value in enumerate(values) if i not in positions]


def _merged(checked: Iterable[Any], others: Iterable[Any], positions: Collection[int]) -> list[Any]:
    """The saved values in their order."""
    there, rest = list(checked), list(others)
    return [there.pop(0) if i in positions else rest.pop(0) for i in range(len(there) + len(rest))]
