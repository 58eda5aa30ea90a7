"""A training step as the search sees it: operations, the storages they make and read, times and sizes.

Built from a joint graph. Only what the order of execution and liveness need is kept; FX nodes serve to tell a tensor's
place in the source and to carry a plan out. No decisions are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from optpass.passes.memory import storage as storages_of
from optpass.passes.memory.purity import why_not_recomputed
from optpass.passes.memory.tangents import behind_tangents, is_tangent
from optpass.passes.roofline.lowering import Fusing

#: A kernel of its own.
ALONE = Fusing()


@dataclass(slots=True)
class Storage:
    """One allocation of a step.

    Attributes:
        bytes: as the allocator counts it; 0 for what the step does not allocate (parameters, inputs, constants).
        producer: index of the operation that makes it; -1 for inputs.
        node: the first FX node whose value lives in it.
        given: an input of the joint graph or a constant: there before the step and after it.
        tangent: a gradient of an output, made by the caller between forward and backward.
    """

    index: int
    node: fx.Node
    bytes: int
    producer: int = -1
    given: bool = False
    tangent: bool = False


@dataclass(slots=True)
class Operation:
    """One node that computes, with the `getitem`s behind it.

    Attributes:
        inputs, outputs: indices of storages, each once.
        seconds: predicted time of running it once.
        flops: of running it once.
        workspace: bytes that it allocates and frees inside itself.
        forward: the forward graph runs it.
        backward: it depends on a tangent: the backward runs it, once, in this order.
        kept_why: why it must not be run again; '' where it may.
        fusing: how the executor runs it together with others.
    """

    index: int
    node: fx.Node
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float = 0.0
    flops: float = 0.0
    workspace: int = 0
    forward: bool = False
    backward: bool = False
    kept_why: str = ""
    fusing: Fusing = ALONE


@dataclass
class Problem:
    """Everything the search knows.

    Attributes:
        operations: in execution order; those of the forward are run in this order, those of the backward in
            about this order (`sequence`). The last one is the return of the backward.
        storages: by index.
        storage_of: root storages of each node's value (several for a tuple).
        forward_outputs: storages that the forward returns.
        backward_outputs: storages that the backward returns: gradients, live until it ends.
        baseline: storages kept from forward to backward when nothing is asked for.
        statics: bytes that are there throughout: parameters, gradients, optimizer state, buffers, inputs.
        tail: bytes that the caller allocates between forward and backward, beside outputs and tangents; negative where
            they are not there at the same time.
        kept: bytes that the caller allocates then and holds until the backward has returned; part of `tail`.
        early: bytes that are there in the forward and gone before the backward: of a forward that runs again, the
            gradients of its outputs.
        outputs_held: the caller holds the outputs until the step ends, not only until its loss has read them.
        tangents_held: the caller holds the gradients of the outputs until the backward has returned.
        saved_held: what is kept from the forward stays until then, for another backward.
    """

    operations: list[Operation]
    storages: list[Storage]
    storage_of: dict[fx.Node, tuple[int, ...]]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    baseline: frozenset[int] = frozenset()
    statics: int = 0
    tail: int = 0
    kept: int = 0
    early: int = 0
    outputs_held: bool = True
    tangents_held: bool = False
    saved_held: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Price:
    """What running a node once takes, and how it goes into kernels with others."""

    seconds: float = 0.0
    flops: float = 0.0
    workspace: int = 0
    fusing: Fusing = ALONE


def build(
    graph: fx.Graph,
    forward_outputs: Sequence[fx.Node],
    backward_outputs: Sequence[fx.Node],
    *,
    saved: Collection[str],
    price: Callable[[fx.Node], Price],
    hint: Callable[[Any], int],
    granularity: int = 1,
) -> Problem:
    """The problem of a joint graph.

    Args:
        graph: forward and backward together; `meta["val"]` on its nodes.
        forward_outputs, backward_outputs: nodes that each part returns.
        saved: names of the nodes that the default partitioner keeps for the backward.
        price: time, FLOPs and workspace of a node.
        hint: int for a symbolic size.
        granularity: as in `storage.nbytes`.
    """
    builder = _Builder(graph, hint, granularity)
    builder.walk(price)
    builder.classify(forward_outputs, saved)
    roots = builder.roots
    builder.end(backward_outputs)
    kept = {s for node in graph.nodes if node.name in saved for s in roots.get(node, ())}
    outputs = tuple(dict.fromkeys(s for n in forward_outputs for s in roots.get(n, ())))
    gradients = tuple(dict.fromkeys(s for n in backward_outputs for s in roots.get(n, ())))
    return Problem(
        operations=builder.operations,
        storages=builder.storages,
        storage_of=roots,
        forward_outputs=tuple(s for s in outputs if not builder.storages[s].given),
        backward_outputs=tuple(s for s in gradients if not builder.storages[s].given),
        baseline=frozenset(s for s in kept if not builder.storages[s].given),
    )


class _Builder:
    def __init__(self, graph: fx.Graph, hint: Callable[[Any], int], granularity: int) -> None:
        self.graph, self.hint, self.granularity = graph, hint, granularity
        self.roots: dict[fx.Node, tuple[int, ...]] = {}
        self.storages: list[Storage] = []
        self.operations: list[Operation] = []
        self._of_node: dict[fx.Node, int] = {}  # operation that a node is
        self._written = _mutated_inputs(graph)

    def walk(self, price: Callable[[fx.Node], Price]) -> None:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.roots[node] = (self._given(node),) if storages_of.is_tensor(node) else ()
            elif node.op != "output":
                self._call(node, price)

    def _given(self, node: fx.Node) -> int:
        tangent = is_tangent(node)
        size = storages_of.nbytes(node.meta["val"], self.hint, self.granularity) if tangent else 0
        self.storages.append(Storage(len(self.storages), node, size, given=True, tangent=tangent))
        return len(self.storages) - 1

    def _call(self, node: fx.Node, price: Callable[[fx.Node], Price]) -> None:
        base = storages_of.view_base(node)
        if storages_of.is_item(node):
            parts = self.roots.get(node.args[0], ())  # type: ignore[arg-type]
            index = node.args[1]
            self.roots[node] = (parts[index],) if isinstance(index, int) and index < len(parts) else parts
            return
        if base is not None:  # of several tensors too: parts of one storage
            self.roots[node] = self.roots.get(base, ())
            return
        target = storages_of.written_argument(node)
        operation = len(self.operations)
        made: tuple[int, ...] = ()
        if target is None:
            made = self._made(node, operation)
        reads = tuple(dict.fromkeys(s for a in node.all_input_nodes for s in self.roots.get(a, ())))
        self.roots[node] = made if target is None else self.roots.get(target, ())
        cost = price(node)
        why = why_not_recomputed(node)
        if not why and any(a in self._written for a in node.all_input_nodes):
            why = "reads an input that the step changes in place"
        self.operations.append(
            Operation(operation, node, reads, made, cost.seconds, cost.flops, cost.workspace, fusing=cost.fusing)
        )
        self.operations[-1].kept_why = why
        self._of_node[node] = operation

    def _made(self, node: fx.Node, operation: int) -> tuple[int, ...]:
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else (value,)
        made = []
        for part in parts:
            size = storages_of.nbytes(part, self.hint, self.granularity)
            self.storages.append(Storage(len(self.storages), node, size, producer=operation))
            made.append(len(self.storages) - 1)
        return tuple(made) if any(isinstance(p, torch.Tensor) for p in parts) else ()

    def end(self, backward_outputs: Sequence[fx.Node]) -> None:
        """The return of the backward, as an operation that reads what is returned."""
        reads = tuple(dict.fromkeys(s for n in backward_outputs for s in self.roots.get(n, ())))
        last = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        index = len(self.operations)
        self.operations.append(Operation(index, last, reads, (), backward=True, kept_why="returns"))

    def classify(self, forward_outputs: Sequence[fx.Node], saved: Collection[str]) -> None:
        """Which operations the forward runs, and which the backward must. What is written to inputs is run where it
        stands, though nobody reads its result."""
        tainted = behind_tangents(self.graph.nodes)
        wanted = [n for n in forward_outputs if isinstance(n, fx.Node)]
        wanted += [n for n in self.graph.nodes if n.name in saved or storages_of.written_argument(n) is not None]
        needed: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node not in needed and node not in tainted:
                needed.add(node)
                wanted.extend(node.all_input_nodes)
        for operation in self.operations:
            operation.backward = operation.node in tainted
            operation.forward = not operation.backward and operation.node in needed


def reads_of_changed_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that compute from an input that the graph also writes to: run again later, they would read other values."""
    written = _mutated_inputs(graph)
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node not in written
        and storages_of.written_argument(node) is None
        and any(a in written for a in node.all_input_nodes)
    ]


def _mutated_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that some node of the graph writes to, and the views of them."""
    written = {storages_of.written_argument(n) for n in graph.nodes} - {None}
    found = {n for n in written if n is not None}
    for node in graph.nodes:
        base = storages_of.view_base(node)
        if base in found:
            found.add(node)
    return found
