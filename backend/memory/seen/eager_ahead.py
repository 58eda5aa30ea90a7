"""A backward of eager code alone, ahead of a step: of what graphs have returned that ran without gradients.

Where a loss over a large batch does not fit, as a contrastive one of all pairs, it is taken of embeddings that were
made without gradients; its gradients are what graphs begin their own backwards with, for one part of the batch after
another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held, held_by_nodes, watch_backwards
from optpass.backend.memory.eager.inside import temporaries_of
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import gradients_of
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.seen.watch import Watch

#: Steps in which it is looked at behind one graph, and backwards until one begins: others may train in eager there.
LOOKS, MOST = 3, 8


@dataclass(frozen=True)
class EagerPart:
    """What eager code ahead of a step has needed.

    Attributes:
        needed: bytes at most, of what counts nowhere else.
        made: what is left of that.
        gradients: bytes of those of the graphs' parameters that were there, by the identity of the parameter.
    """

    needed: int
    made: Stores
    gradients: Mapping[int, int]


class EagerAhead:
    """Looks at backwards that begin between a graph without gradients and a step.

    Args:
        leaves: tells the graphs that have run in steps.
        lock: of who asks.
    """

    def __init__(self, leaves: Callable[[], Iterable[Leaf]], lock: threading.RLock) -> None:
        self._leaves, self._lock = leaves, lock
        self._gradients: dict[int, int] = {}
        self._looked: weakref.WeakKeyDictionary[Callable[[], int], int] = weakref.WeakKeyDictionary()
        self._unwatch: Callable[[], None] | None = None
        self._elsewhere = Stores()
        self._watches: list[tuple[Watch, dict[int, Held], list[weakref.ref[torch.Tensor]]]] = []

    def graph_ran(self, needs: Callable[[], int], lent: Any) -> None:
        """A graph has run without gradients while no other waited for its backward.

        Args:
            needs: of the graph.
            lent: a nest of what it was given and has returned, which counts as that.
        """
        self._elsewhere.prune()
        self._elsewhere.add(t for t in torch.utils._pytree.tree_leaves(lent) if isinstance(t, torch.Tensor))
        if self._unwatch is None and self._looked.setdefault(needs, 0) < LOOKS:
            self._looked[needs] += 1
            self._unwatch = watch_backwards(self._begins)

    def step(self) -> EagerPart | None:
        """A step begins: what was seen since the last one; None where no backward was."""
        self._stop()
        watches, self._watches, self._elsewhere = self._watches, [], Stores()
        made, needed = Stores(), 0
        for watch, known, leaves in watches:
            watch.end()
            needed = max(needed, watch.peak(-1, inf, Stores()) or 0)
            made.keep((s._cdata, one) for held in known.values() for one in held.storages if (s := one()) is not None)
            there = [leaf for reference in leaves if (leaf := reference()) is not None]
            made.drop(Stores(there))  # what needs a gradient counts nowhere else
            made.add(leaf.grad for leaf in there if leaf.grad is not None)
        gradients, self._gradients = self._gradients, {}
        return EagerPart(needed, made, gradients) if watches else None

    def forget(self) -> None:
        """A graph runs in the backward that was looked at: it is the step's own, whose checkpoints ran without
        gradients."""
        self._stop()
        for watch, _, _ in self._watches:
            watch.end()
        self._watches = []

    def _stop(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _begins(self, roots: list[Any]) -> None:
        with self._lock:
            if len(self._watches) == MOST:
                self._stop()
            elif autograd.running_backward() is None:
                self._look(roots)

    def _look(self, roots: list[Any]) -> None:
        nodes = [node for node in autograd.walk(roots, lambda _: False) if not autograd.is_compiled(node)]
        leaves = [leaf for node in nodes if (leaf := autograd.leaf_of(node)) is not None]
        elsewhere = Stores(leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
        watch, known = Watch(elsewhere.with_those_of(self._elsewhere)), held_by_nodes(nodes)
        watch.follow(nodes, known, lambda node: temporaries_of(node, known.get(autograd.order(node))))
        self._gradients = gradients_of(self._leaves())
        self._watches.append((watch, known, [weakref.ref(leaf) for leaf in leaves]))
