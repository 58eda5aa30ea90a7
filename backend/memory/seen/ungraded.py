"""What a compiled graph needs while it runs without gradients, as a teacher does between a forward and its backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.backend import compat
from optpass.backend.capture import Source
from optpass.backend.memory.replay.replay import Executor, replay_graph, replay_inductor
from optpass.backend.memory.seen.leaves import Leaf, Stores, parameters_of
from optpass.reporting import store

log = logging.getLogger(__name__)


class Lent:
    """Storages that graphs have read and returned which ran without gradients, as far as they are there.

    Attributes:
        stores: all of them.
    """

    def __init__(self) -> None:
        self.stores, self._lately = Stores(), Stores()

    def add(self, values: Any) -> None:
        """Take in the tensors of a nest of values."""
        tensors = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        for stores in (self.stores, self._lately):
            stores.prune()
            stores.add(tensors)

    def begin(self) -> None:
        """A backward begins, or a step has failed."""
        self._lately = Stores()

    def lately(self) -> Stores:
        """Those since then."""
        found = Stores()
        found.update(self._lately)
        return found


def note_stepping(leaves: Iterable[Leaf], args: Sequence[Any], needs: Callable[[], int]) -> None:
    """A graph that ran without gradients was the step of an optimizer if it was given the gradients of others.

    Args:
        leaves: graphs that have run lately.
        args: what it was given.
        needs: bytes that it needed beside that.
    """
    given = Stores(t for t in args if isinstance(t, torch.Tensor))
    for leaf in set(leaves):
        if any(p.grad is not None and given.has(p.grad.untyped_storage()) for p in parameters_of([leaf])):
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
