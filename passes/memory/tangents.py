"""The gradients of the forward's outputs in a joint graph, and what is computed from them: the backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def is_tangent(node: fx.Node) -> bool:
    """Whether `node` is an input of the joint graph that is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def behind_tangents(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The gradients of the outputs among `nodes`, which stand in order, and all that is computed from them."""
    found: set[fx.Node] = set()
    for node in nodes:
        if is_tangent(node) or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found
