"""What the forward computes for the backward alone, moved to where what it is made of would else be released.

Autograd's formulas compute some of it behind the forward: the mask of a ReLU, a cast of a transposed operand. Where
that is saved in place of the larger tensor that it is made of, and stands there, all of these tensors are there until
the forward ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from optpass.passes.memory import storage as storages_of
from optpass.passes.memory.purity import why_not_recomputed
from optpass.passes.memory.tangents import behind_tangents


def compute_early(graph: fx.Graph, forward_outputs: Iterable[fx.Node], saved: Collection[str]) -> int:
    """Move what only `saved` nodes need to the last use of one of the tensors it is made of; how much was moved.

    What may have effects stays, and what reads an input that the graph writes to. In place; results are the same bits.

    Args:
        graph: a joint graph, or the forward's.
        forward_outputs: nodes that the forward returns to its caller.
        saved: names of nodes that are kept for the backward.
    """
    return _Mover(graph, forward_outputs, saved).move()


class _Mover:
    """`place` says where a node stands, in the order at first; what is moved has the place of what it was put behind.

    Attributes:
        roots: of each node, the nodes that its value is a view or a part of.
        late: nodes that serve `saved` alone, and stand behind all that the forward returns.
    """

    def __init__(self, graph: fx.Graph, forward_outputs: Iterable[fx.Node], saved: Collection[str]) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.roots = _roots(self.nodes)
        written = [n for n in self.nodes if storages_of.written_argument(n) is not None]
        self._written = {r for n in written for a in [storages_of.written_argument(n)] if a for r in self.roots[a]}
        behind = behind_tangents(self.nodes)
        returned = _needed([*forward_outputs, *written], behind)
        self._lasting = {r for n in forward_outputs for r in self.roots[n]}
        last = max((self.place[n] for n in returned if n not in written), default=len(self.nodes))
        wanted = _needed((n for n in self.nodes if n.name in saved), behind) - returned
        self.late = {n for n in wanted if n.op == "call_function" and self.place[n] > last}
        self._last_use: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node in returned:
                self._use(node, self.place[node])
        self._behind: dict[int, fx.Node] = {}

    def move(self) -> int:
        """Move what can be; how many nodes that compute something."""
        moved = 0
        for node in self.nodes:
            place = self._wanted(node) if node in self.late else None
            if place is None:
                continue
            self._put(node, place)
            for item in node.users:
                if storages_of.is_item(item) and item in self.late:
                    self._put(item, place)
            self._use(node, place)
            moved += 1
        return moved

    def _wanted(self, node: fx.Node) -> int | None:
        """Where a node that computes is to stand; None where it is to stay, or computes nothing."""
        if self._comes_along(node) or why_not_recomputed(node):
            return None
        read = {r for a in node.all_input_nodes for r in self.roots[a]}
        made = [r for r in read if r.op == "call_function"]
        tensors = [r for r in made if isinstance(r.meta.get("val"), (torch.Tensor, tuple, list))]  # the rest are sizes
        released = [self._last_use.get(r, self.place[r]) for r in tensors if r not in self._lasting]
        if not released or read & self._written:
            return None
        place = max(min(released), self._ready(node))
        return place if place < self.place[node] else None

    def _ready(self, node: fx.Node) -> int:
        """Where all that it reads is there; views and parts can be taken anywhere behind what they are of."""
        places = [self.place[a] for a in node.all_input_nodes if not self._comes_along(a)]
        return max([*places, *(self._ready(a) for a in node.all_input_nodes if self._comes_along(a))], default=0)

    def _comes_along(self, node: fx.Node) -> bool:
        return node in self.late and (storages_of.is_item(node) or storages_of.view_base(node) is not None)

    def _put(self, node: fx.Node, place: int) -> None:
        """Behind the node at `place`, and all that was put there before; views that it reads come with it."""
        for source in node.all_input_nodes:
            if source in self.late and self.place[source] > place:
                self._put(source, place)
        self._behind.get(place, self.nodes[place]).append(node)
        self._behind[place] = node
        self.place[node] = place

    def _use(self, node: fx.Node, place: int) -> None:
        for source in node.all_input_nodes:
            for root in self.roots[source]:
                self._last_use[root] = max(self._last_use.get(root, 0), place)


def _roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        base = node.args[0] if storages_of.is_item(node) else storages_of.view_base(node)
        found[node] = found[base] if isinstance(base, fx.Node) else frozenset((node,))
    return found


def _needed(wanted: Iterable[fx.Node], behind: Collection[fx.Node]) -> set[fx.Node]:
    """`wanted` and all that they are computed from, less what is behind the tangents."""
    stack, found = [n for n in wanted if isinstance(n, fx.Node)], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in found and node not in behind:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
