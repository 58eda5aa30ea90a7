"""Random numbers that are drawn again: the generator's state before a draw is kept, and the same operator runs from it.

A mask of a dropout is as many bytes as it has elements, what a CPU's generator is in a few thousand. So in the graph
that plans are made for, a draw is two operations: one that only the forward runs, which makes the state, and one that
computes from it and may be run again. Where the forward graph runs both, they are the draw itself (`settle`). Numbers
are the same to the bit, and the generator goes on as if nothing was drawn twice: torch's own operators see to that.

A CPU's generator alone is known here. Inductor draws from seeds that it keeps, and needs none of this.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from optpass.passes.memory.purity import draws
from optpass.passes.memory.storage import is_item
from optpass.passes.memory.workspace.workspace import SAVES_STATE, WITH_STATE


def split(graph: fx.Graph) -> None:
    """Make each draw of a joint graph one of a state and one that computes from it. In place."""
    for node in list(graph.nodes):
        if _is_known(node):
            _split(node)


def settle(forward: fx.Graph) -> None:
    """Where a forward graph keeps a state, let it draw as it does; where it keeps none, let it be the draw that it was.
    In place."""
    for saves in forward.find_nodes(op="call_function", target=SAVES_STATE):
        users = list(saves.users)
        state = users[0] if len(users) == 1 and is_item(users[0]) else saves
        drawn = next((user for user in state.users if user.target is WITH_STATE), None)
        if drawn is None:  # in the backward alone; or not one of those that `split` makes
            continue
        kept = len(state.users) > 1
        with forward.inserting_after(state) if kept else forward.inserting_before(saves):
            call = (operator.getitem, (saves, 1)) if kept else (saves.args[0], saves.args[1:], saves.kwargs)
            new = forward.call_function(*call)
        new.meta = drawn.meta
        drawn.replace_all_uses_with(new)
        for node in (drawn,) if kept else (drawn, state, saves):
            forward.erase_node(node)
        new.name = drawn.name  # by which the backward finds what is saved


def is_state(node: fx.Node) -> bool:
    """Whether a node of such a graph makes a state and nothing that anybody reads."""
    return node.target is SAVES_STATE


def drawn_by(node: fx.Node) -> Any:
    """What a node calls: where it computes from a state, the operator that draws."""
    return node.args[1] if node.target is WITH_STATE else node.target


def _is_known(node: fx.Node) -> bool:
    """Whether a node draws from the CPU's default generator and does nothing else."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or not draws(node):
        return False
    if target.namespace != "aten" or node.kwargs.get("generator") is not None:
        return False
    if node.meta.get("partitioner_tag") != "is_forward":  # as AOTAutograd marks it; what the backward draws runs once
        return False
    values = tree_leaves([node.meta.get("val"), [a.meta.get("val") for a in node.all_input_nodes]])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(node.all_input_nodes) and all(t.device.type == "cpu" for t in tensors)


def _split(node: fx.Node) -> None:
    graph, name, call = node.graph, node.name, (cast("torch._ops.OpOverload", node.target), *node.args)
    with graph.inserting_before(node):
        saves = graph.call_function(SAVES_STATE, call, node.kwargs)
        state = graph.call_function(operator.getitem, (saves, 0))
        again = graph.call_function(WITH_STATE, (state, *call), node.kwargs)
    value = node.meta["val"]
    mode = next(t.fake_mode for t in tree_leaves(value) if hasattr(t, "fake_mode"))
    with mode:
        kept = torch.empty(torch.get_rng_state().numel(), dtype=torch.uint8, device="cpu")
    again.meta, saves.meta, state.meta = dict(node.meta), dict(node.meta) | {"val": (kept, value)}, {"val": kept}
    node.replace_all_uses_with(again)
    graph.erase_node(node)
    again.name = name  # by which the default plan knows it
