"""What a compiled graph needs while it runs without gradients, as a teacher does before the graph that it teaches, or
between its forward and its backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.capture import Source
from optpass.backend.compat.memory_backward import Held
from optpass.backend.memory.replay.alone import replay_graph, replay_inductor
from optpass.backend.memory.replay.replay import Executor
from optpass.backend.memory.seen.eager_ahead import EagerPart
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import gradients_of, parameters_of
from optpass.backend.memory.seen.stores import Stores
from optpass.reporting import store

log = logging.getLogger(__name__)

#: Graphs without gradients that are kept in mind before a step begins.
MOST_AHEAD = 8


@dataclass(frozen=True)
class Ahead:
    """A graph that ran without gradients while no other waited for its backward: of the step that begins behind it, as
    a teacher is, or of none, as an evaluation.

    Attributes:
        given: what it was given, parameters aside: weakly, each storage with the elements that were read of it.
        made: what it returned.
        gradients: bytes of those that were there, by the identity of the parameter.
        needs: bytes that it needed beside what it was given, with what it returned.
    """

    given: tuple[tuple[weakref.ref[Any], int], ...]
    made: Stores
    gradients: Mapping[int, int]
    needs: Callable[[], int]

    def is_of_step(self, inputs: Stores, sizes: Collection[int], read: Stores) -> bool:
        """Whether it ran for a step: on what a graph of it is given, parameters and buffers aside, or for what such a
        graph or its loss reads. On all of a set of data of which a step is given a batch, it is an evaluation.

        Args:
            inputs: what graphs of the step are given.
            sizes: elements of each.
            read: `inputs`, and what operators of its eager part have saved.
        """
        given = ((storage, size) for ref, size in self.given if (storage := ref()) is not None)
        shared = any(size in sizes and inputs.has(storage) for storage, size in given)
        return shared or any(read.has(storage) for storage in self.made.storages())

    def needed(self, there: int, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes while it ran, where `there` bytes are there in the step of `parameters`, what it returned included and
        gradients not."""
        gradients = sum(self.gradients.get(id(parameter), 0) for parameter in parameters)
        return there - self.made.bytes() + gradients + self.needs()


class Lent:
    """Storages that graphs have read and returned which ran without gradients, as far as they are there.

    Attributes:
        stores, values: all of them; those that are no parameters.
    """

    def __init__(self) -> None:
        self.stores, self.values, self._lately = Stores(), Stores(), Stores()
        self._has_run = False  #: since a step began
        self.ahead: list[Ahead] = []  #: of the step that has begun
        self._waiting: list[Ahead] = []  #: since the last step has

    def add(self, values: Any) -> None:
        """Take in the tensors of a nest of values."""
        tensors = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        for stores in (self.stores, self._lately):
            stores.prune()
            stores.add(tensors)
        self.values.prune()
        self.values.add(t for t in tensors if not isinstance(t, torch.nn.Parameter))
        self._has_run = True

    def left(self) -> Stores:
        """A step begins: what may be left of graphs that ran since the last one did, parameters aside."""
        found = Stores()
        found.update(self.values if self._has_run else found)
        self._has_run = False
        return found

    def run_ahead(self, one: Ahead) -> None:
        """A graph has run while no other waits for its backward."""
        self._waiting = [*self._waiting, one][-MOST_AHEAD:]  # an evaluation has many batches

    def step(self, eager: EagerPart | None) -> None:
        """A step, or a micro-batch of it, begins, behind what `eager` code has made of what these graphs returned."""
        if eager is not None and self._waiting:
            given = tuple(one for graph in self._waiting for one in graph.given)
            self._waiting = [*self._waiting, Ahead(given, eager.made, eager.gradients, lambda: eager.needed)]
        self.ahead, self._waiting = self._waiting, []

    def about_to_step(self) -> list[Ahead]:
        """What ran ahead of the graph that is being compiled."""
        return [*self.ahead, *self._waiting]

    def needed_ahead(
        self, inputs: Stores, sizes: Collection[int], known: Mapping[int, Held], there: int,
        parameters: Sequence[torch.Tensor],
    ) -> int:  # fmt: skip
        """Bytes that were there, parameters and the like aside, while graphs ran ahead of the step; 0 without any.

        Args:
            inputs, sizes: what graphs of the step are given, parameters and buffers aside, and elements of each.
            known: what nodes of the eager part hold.
            there: bytes that are there in the step beside the graphs.
            parameters: of the step.
        """
        read = Stores()
        read.update(inputs)
        read.keep((one.key, one.storage) for nodes in known.values() for one in nodes.outside)
        of_step = [one for one in self.ahead if one.is_of_step(inputs, sizes, read)]
        return max((one.needed(there, parameters) for one in of_step), default=0)

    def begin(self) -> None:
        """A backward begins, or a step has failed."""
        self._lately = Stores()

    def lately(self) -> Stores:
        """Those since then."""
        found = Stores()
        found.update(self._lately)
        return found


def ahead_of(leaves: Iterable[Leaf], args: Sequence[Any], result: Any, needs: Callable[[], int]) -> Ahead:
    """A graph without gradients has run on `args`, before a step of `leaves` if those are what runs next."""
    tensors = [t for t in args if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter)]
    given = tuple((ref, t.numel()) for t in tensors for ref, _ in Stores([t]).sizes())
    made = Stores(t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
    return Ahead(given, made, gradients_of(leaves), needs)


def note_stepping(leaves: Iterable[Leaf], args: Sequence[Any], needs: Callable[[], int]) -> None:
    """A graph that ran without gradients was the step of an optimizer if it was given the gradients of others.

    Args:
        leaves: graphs that have run lately.
        args: what it was given.
        needs: bytes that it needed beside that.
    """
    given = Stores(t for t in args if isinstance(t, torch.Tensor))
    for leaf in set(leaves):
        if any(p.grad is not None and given.behind_any(p.grad) for p in parameters_of([leaf])):
            leaf.stepping = max(leaf.stepping or 0, needs())
            leaf.news = True


def needs_of(source: Source, executor: Executor, patches: dict[str, Any] | None) -> Callable[[], int]:
    """A function that says how many bytes it needs beside what it is given, what it returns included.

    The graph is traced again and replayed when that is first asked, which most programs never do. 0 where it cannot be.

    Args:
        source: the graph before it was compiled.
        executor: who runs it.
        patches: Inductor's settings of the compile.
    """
    known: list[int] = []

    def needs() -> int:
        if not known:
            try:
                known.append(_replayed(source, executor, patches))
            except Exception as error:  # a step that trains must not die of a figure
                log.debug("what a graph without gradients needs was not found", exc_info=True)
                text = " ".join(str(error).split())[:200]
                store.current().warn(f"memory budget: what a graph without gradients needs is not counted ({text})")
                known.append(0)
        return known[0]

    return needs


def _replayed(source: Source, executor: Executor, patches: dict[str, Any] | None) -> int:
    with compat.without_saved_tensors_hooks():
        (graph,) = (one.graph for one in source.trace(as_inductor=executor == "inductor"))
        gm = fx.GraphModule(graph.owning_module or {}, graph)
        inputs = range(len(graph.find_nodes(op="placeholder")))
        if executor == "graph":
            return replay_graph(gm, static_inputs=inputs).peak_bytes
        return replay_inductor(gm, is_backward=False, static_inputs=inputs, config_patches=patches).peak_bytes
