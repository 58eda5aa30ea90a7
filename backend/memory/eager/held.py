"""What autograd nodes of the eager part of a step hold, around and between compiled graphs, while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import held_by_checkpoints


def held_upstream(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What eager operators have saved on the way to `tensors`, and the parameters that they read.

    Compiled graphs on the way are passed over: what they save is theirs to say.
    """
    saved: list[torch.Tensor] = []
    leaves: list[torch.Tensor] = []
    for node in autograd.walk(autograd.nodes_behind(tensors), lambda node: False):
        leaf = autograd.leaf_of(node)
        if leaf is not None:
            leaves.append(leaf)
        elif not autograd.is_compiled(node):
            saved += [*autograd.saved_by_operator(node), *autograd.saved_by_function(node), *held_by_checkpoints(node)]
    return saved, leaves


def only_handed_on(
    inputs: Iterable[tuple[int, torch.Tensor]], outputs: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Those of a graph's inputs that earlier graphs returned and do not read again themselves: positions and bytes.

    Args:
        inputs: with their positions.
        outputs: bytes of what earlier graphs returned, by storage.
    """
    if autograd.packs_what_is_saved():
        return ()
    found: dict[int, tuple[int, int]] = {}
    for position, value in inputs:
        if value.layout != torch.strided or value.grad_fn is None or not autograd.is_compiled(value.grad_fn):
            continue
        key = value.untyped_storage()._cdata
        saved = (t for t in autograd.saved_by_function(value.grad_fn) if t.layout == torch.strided)
        if key in outputs and all(key != t.untyped_storage()._cdata for t in saved):
            found[key] = (position, outputs[key])
    return tuple(found.values())


def pending(roots: Iterable[Any], now: Any) -> tuple[int, list[torch.Tensor]]:
    """What a backward that has come to the node `now` holds for nodes that are still to run: bytes of gradients, and
    the tensors that eager operators among them have saved.

    A gradient waits where the node that it goes to has not run: for more of the same sum, or for its turn.
    """
    if now is None:
        return 0, []
    place = autograd.order(now)
    waiting: dict[tuple[Any, int], int] = {}
    saved: list[torch.Tensor] = []
    awaited: set[Any] = {now}
    for node in autograd.walk(roots, lambda node: False):
        if autograd.leaf_of(node) is not None:
            continue
        to_run = node is now or autograd.order(node) < place
        if to_run and node is not now and not autograd.is_compiled(node):
            saved += autograd.saved_by_operator(node)
            saved += autograd.saved_by_function(node)
        for following, index in node.next_functions:
            if following is None or following is now:
                continue
            if to_run:
                awaited.add(following)
            elif autograd.leaf_of(following) is not None or autograd.order(following) < place:
                waiting[following, index] = _size_at(following, index)
    settled = {node for node, _ in waiting if autograd.leaf_of(node) is not None and node not in awaited}
    return sum(size for (node, _), size in waiting.items() if node not in settled), saved


def due(roots: Iterable[Any], now: Any, after: float) -> int:
    """Bytes of gradients that wait for the node `now` and for those still to run, from nodes whose places are `after`
    or behind it."""
    place = autograd.order(now)
    nodes = [node for node in autograd.walk(roots, lambda node: False) if autograd.leaf_of(node) is None]
    awaited = {n for node in nodes if node is now or autograd.order(node) < place for n, _ in node.next_functions}
    slots = set()
    for node in nodes:
        for following, index in node.next_functions if autograd.order(node) >= after else ():
            leaf = following is not None and autograd.leaf_of(following) is not None
            if following is not None and (following in awaited if leaf else autograd.order(following) <= place):
                slots.add((following, index))
    return sum(_size_at(following, index) for following, index in slots)


def held_in(roots: Iterable[Any]) -> list[torch.Tensor]:
    """What the nodes of a backward have saved that has come to some node of it, as far as it is not released."""
    saved: list[torch.Tensor] = []
    for node in autograd.walk(roots, lambda node: False):
        if not autograd.is_compiled(node) and autograd.leaf_of(node) is None:
            saved += autograd.saved_by_operator(node)
            saved += autograd.saved_by_function(node)
    return saved


def _size_at(node: Any, index: int) -> int:
    """Bytes of the gradient that a node is given for its result `index`."""
    leaf = autograd.leaf_of(node)
    if leaf is not None:
        return leaf.nbytes if leaf.layout == torch.strided else 0
    extents = autograd.output_extents(node)
    return prod(extents[index][0]) * extents[index][1] if index < len(extents) else 0
