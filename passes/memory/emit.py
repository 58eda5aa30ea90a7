"""Carrying a plan out: the joint graph written anew, with every recomputation where the plan has it.

The forward stays as it is. The backward stands in the plan's order, with a copy of a forward operation wherever the
plan computes a tensor again; what the copies and the backward read of the forward is what the plan saves, so that any
partitioner that is told these nodes extracts the two halves. Views are taken again from their base wherever they are
read: they never hold a storage for longer than the plan does. Of what the plan has in host memory, the copy there is
what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from optpass.errors import PassError
from optpass.passes.memory import storage as storages_of
from optpass.passes.memory import transfers
from optpass.passes.memory.problem import Problem
from optpass.passes.memory.purity import draws
from optpass.passes.memory.search.timeline import Offloaded, Timeline
from optpass.passes.memory.tangents import is_tangent

#: Marks nodes of the backward that compute a forward tensor again.
RECOMPUTED = "optpass_recomputed"


def rewrite(
    joint: fx.GraphModule, problem: Problem, timeline: Timeline,
    module: Callable[[fx.GraphModule, fx.Graph], fx.GraphModule] = fx.GraphModule,
) -> tuple[fx.GraphModule, list[fx.Node]]:  # fmt: skip
    """The joint graph as the plan has it.

    Args:
        joint: the joint graph that `problem` describes; left as it is.
        problem: the step.
        timeline: the plan.
        module: makes the module of the attributes of one and a graph.

    Returns:
        A module with the inputs and outputs of `joint`, and its nodes to save: one per storage that the plan keeps,
        after the inputs.

    Raises:
        PassError: the plan reads what is neither saved nor computed.
    """
    graph, saved = _Writer(joint, problem, timeline).write()
    written = module(joint, graph)
    written.meta.update(joint.meta)
    return written, saved


class _Writer:
    """`now` says what stands for a node of the old graph, by name, at the point that writing has reached."""

    def __init__(self, joint: fx.GraphModule, problem: Problem, timeline: Timeline) -> None:
        self.joint, self.problem, self.timeline = joint, problem, timeline
        self.graph = fx.Graph()
        self.graph._codegen = joint.graph._codegen
        self.now: dict[str, fx.Node] = {}
        self._sources: dict[str, tuple[fx.Node, ...]] = {}  # what a derived node was derived from
        self._given: set[str] = set()
        self._operations = {o.node.name: o for o in problem.operations}
        self._copies = _Copies(self.graph, bases_of(joint.graph, problem), timeline.offloaded)

    def write(self) -> tuple[fx.Graph, list[fx.Node]]:
        forward = self._forward()
        saved = self._saved(forward)
        for step, index in enumerate(self.timeline.steps):
            for name, node in self._copies.back(step):
                self.now[name] = node
                self._given.add(name)
            operation = self.problem.operations[index]
            if operation.node.op != "output":
                self._compute(operation.node, again=not operation.backward, alone=not operation.forward)
        self._output(forward)
        self.graph.lint()
        return self.graph, saved

    def _forward(self) -> dict[str, fx.Node]:
        """Everything that does not depend on a tangent, as it is; what nobody reads is dead code by the end."""
        copied: dict[str, fx.Node] = {}
        position = 0
        for node in self.joint.graph.nodes:
            if node.op != "output" and all(a.name in copied for a in node.all_input_nodes):
                operation = self._operations.get(node.name)
                if operation is not None and operation.forward:
                    self._copies.out(position - 1, copied)
                    position += 1
                if operation is None or not operation.backward:
                    copied[node.name] = self.graph.node_copy(node, lambda a: copied[a.name])
        self._copies.out(position, copied)
        return copied

    def _saved(self, forward: dict[str, fx.Node]) -> list[fx.Node]:
        """Say what stands for what the backward is given: inputs, sizes, and one tensor for each storage kept."""
        wanted = set(self.timeline.saved)
        inputs, kept = [], []
        for node in self.joint.graph.nodes:
            roots = self.problem.storage_of.get(node, ())
            tensor = storages_of.is_tensor(node)
            given = node.op in ("placeholder", "get_attr") or (_is_size(node) and node.name in forward)
            if tensor and not given and len(roots) == 1 and roots[0] in wanted:
                wanted.discard(roots[0])  # its first tensor is its base; views come later
                copy = self._copies.host(roots[0])
                kept.append(forward[node.name] if copy is None else copy)
                given = copy is None
            elif tensor and node.op == "placeholder" and not is_tangent(node):
                inputs.append(forward[node.name])  # a size among the inputs is passed on with the other sizes
            if given:
                self.now[node.name] = forward[node.name]
                self._given.add(node.name)
        return [*inputs, *kept]

    def _compute(self, node: fx.Node, *, again: bool, alone: bool) -> None:
        """One node in the backward; `alone`: the forward graph does not run it."""
        new = self.graph.node_copy(node, self._use)
        if again:
            new.meta[RECOMPUTED] = True
        if alone and draws(node):  # as Inductor's seeds of what a backward draws itself
            new.meta["partitioner_tag"] = "must_be_in_backward"
        self._given.discard(node.name)
        self.now[node.name] = new
        for user in node.users:  # at once: a tuple holds all its tensors for as long as it lives
            if storages_of.is_item(user):
                self._given.discard(user.name)
                self._derive(user)

    def _use(self, node: fx.Node) -> fx.Node:
        """What stands for a node of the old graph here; views are made where they are read."""
        stack = [node]
        while stack:
            current = stack[-1]
            if self._settled(current):
                stack.pop()
                continue
            missing = [a for a in current.all_input_nodes if not self._settled(a)]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self._derive(current)
        return self.now[node.name]

    def _derive(self, node: fx.Node) -> None:
        self._sources[node.name] = tuple(self.now[a.name] for a in node.all_input_nodes)
        self.now[node.name] = self.graph.node_copy(node, lambda a: self.now[a.name])

    def _settled(self, node: fx.Node) -> bool:
        """Whether `now` has a node for it that was made from what stands for its inputs now."""
        if node.name in self._given:
            return True
        if node.name in self._operations:
            if node.name not in self.now:
                raise PassError(f"the plan reads {node.name!r} where it is neither saved nor computed")
            return True
        if node.name not in self.now:
            return False
        return all(self._settled(a) for a in node.all_input_nodes) and self._sources[node.name] == tuple(
            self.now[a.name] for a in node.all_input_nodes
        )

    def _output(self, forward: dict[str, fx.Node]) -> None:
        output = next(n for n in reversed(self.joint.graph.nodes) if n.op == "output")

        def value(node: fx.Node) -> fx.Node:
            roots = self.problem.storage_of.get(node, ())
            backward = any(s in returned for s in roots) or node.name not in forward
            return self._use(node) if backward else forward[node.name]

        returned = set(self.problem.backward_outputs) - set(self.problem.forward_outputs)
        self.graph.node_copy(output, value)


class _Copies:
    """The copies to host memory and back that a plan has, written where it has them.

    Args:
        graph: is written to.
        bases: by storage, the node of the joint graph that is its first tensor.
        items: of the plan.
    """

    def __init__(self, graph: fx.Graph, bases: Mapping[int, fx.Node], items: Sequence[Offloaded]) -> None:
        self._graph, self._bases, self._items = graph, bases, items
        self._tickets: dict[int, fx.Node] = {}
        self._host: dict[int, fx.Node] = {}

    def host(self, storage: int) -> fx.Node | None:
        """The copy of a storage that is saved; None where that is itself."""
        return self._host.get(storage)

    def out(self, position: int, forward: Mapping[str, fx.Node]) -> None:
        """Begin what is to begin up to a position of the forward, and end what is to end; `forward`: nodes so far."""
        for item in sorted(self._items, key=lambda i: (i.begins, i.storage)):
            source = forward.get(self._bases[item.storage].name)
            if source is not None and item.begins <= position and item.storage not in self._tickets:
                self._tickets[item.storage] = self._call(transfers.OFFLOAD, source)
        for item in self._items:
            if item.gone <= position and item.storage in self._tickets and item.storage not in self._host:
                source = forward[self._bases[item.storage].name]
                self._host[item.storage] = self._call(transfers.OFFLOADED, self._tickets[item.storage], source)

    def back(self, step: int) -> Iterator[tuple[str, fx.Node]]:
        """Begin what is to begin before a step of the backward; what has come back for it: nodes by the names of those
        that they stand for."""
        for item in self._items:
            base, host = self._bases[item.storage], self._host[item.storage]
            device = base.meta["val"].device
            if item.back == step:
                self._tickets[item.storage] = self._call(transfers.RELOAD, host, device)
            if item.read == step:
                yield base.name, self._call(transfers.RELOADED, self._tickets[item.storage], host, device)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda a: a.meta["val"]))
        return node


def bases_of(graph: fx.Graph, problem: Problem) -> dict[int, fx.Node]:
    """The first tensor of each storage that the graph makes: all others of the storage are views of it."""
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        roots = problem.storage_of.get(node, ())
        if len(roots) == 1 and storages_of.is_tensor(node):
            found.setdefault(roots[0], node)
    return found


def _is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number that the forward knows: a size, a stride, a flag."""
    return node.op == "call_function" and isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    )
