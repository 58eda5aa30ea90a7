"""Which compiled graphs with a memory budget run in a step, what each holds, and what else is held beside it.

A run begins with a graph's forward and ends with its backward, or when autograd lets go of it: an output that nobody
differentiates is dropped some time. What the runs of a step need together is seen here while the first steps run; the
plans that follow from it are made in `allot`. Nothing here changes what is computed.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.memory.eager_part import EagerLoss, held_upstream, loss_of
from optpass.backend.memory.leaves import Beside, Leaf, Stores, parameters_of

#: Chains of runs that are remembered, to find which of them make up one step.
REMEMBERED = 64
#: How often a graph is looked at beside the same other runs: where nothing else runs, once says all.
LOOKS_ALONE, LOOKS = 1, 2


@dataclass(eq=False)
class Run:
    """One call of a leaf whose backward has not run.

    Attributes:
        node: of autograd.
        released: a storage that autograd releases with the backward, as far as there is one.
        inputs, outputs, eager: storages of its arguments and results, and of what eager operators before it saved.
        looked_at: what is beside it in its backward is to be noted.
    """

    leaf: Leaf
    node: weakref.ref[Any]
    released: Any
    inputs: Stores
    outputs: Stores
    eager: Stores
    parameters: list[weakref.ref[torch.Tensor]]
    looked_at: bool = True
    done: bool = False

    def is_over(self) -> bool:
        """Its backward has run, or nobody can ask for it any more."""
        if self.done or self.node() is None:
            return True
        return self.released is not None and self.released() is None


@dataclass
class Chain:
    """Runs from the first forward after a backward, to the next such forward."""

    origin: object
    leaves: Counter[Leaf] = field(default_factory=Counter)


class Steps:
    """The runs of this process.

    Args:
        settle: told the leaves of a whole step when one has been seen and the next begins.
    """

    def __init__(self, settle: Callable[[list[Leaf]], None]) -> None:
        self._settle = settle
        self._lock = threading.RLock()
        self._live: list[Run] = []
        self._chains: deque[Chain] = deque(maxlen=REMEMBERED)
        self._after_backward = True

    # ---- what is held now ---------------------------------------------------------------------------------------

    def held(self) -> tuple[int, Stores]:
        """Bytes that the runs hold which wait for their backward, and their outputs, which are part of it."""
        with self._lock:
            self._sweep()
            outputs = Stores()
            for run in self._live:
                outputs.update(run.outputs)
            return sum(run.leaf.held for run in self._live), outputs

    def waiting(self) -> list[Leaf]:
        """The leaves of the runs that wait for their backward, one that runs several times as often."""
        with self._lock:
            self._sweep()
            return [run.leaf for run in self._live]

    def waiting_parameters(self) -> list[torch.Tensor]:
        """Parameters of the runs that wait for their backward."""
        with self._lock:
            self._sweep()
            found = [p() for run in self._live for p in run.parameters]
        return [p for p in found if p is not None]

    # ---- what happens -------------------------------------------------------------------------------------------

    def enter(self, origin: object) -> None:
        """A graph is called."""
        with self._lock:
            self._sweep()
            if self._live and not self._after_backward:
                return
            self._after_backward = False
            if self._chains and not self._chains[-1].leaves:
                return
            step = self._step_of(origin)
            self._chains.append(Chain(origin))
        news = any(leaf.news for leaf in step)
        for leaf in step:
            leaf.news = False
        if news:
            self._settle(step)

    def _step_of(self, origin: object) -> list[Leaf]:
        """The leaves that ran since a chain last began with `origin`, the latest of each."""
        found: dict[Leaf, None] = {}
        for chain in reversed(self._chains):
            found.update(dict.fromkeys(leaf.latest() for leaf in chain.leaves))
            if chain.origin is origin:
                return list(found)
        return []

    def _parameters(self) -> list[torch.Tensor]:
        """Those of the step that is under way, as far as it is known."""
        if not self._chains:
            return []
        now = self._chains.pop()
        step = [*self._step_of(now.origin), *now.leaves]
        self._chains.append(now)
        return parameters_of(step)

    def leave(self, leaf: Leaf, args: Sequence[Any], result: Any) -> None:
        """A leaf's forward has run."""
        node = autograd.compiled_node(result)
        if node is None:
            return
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        parameters = [args[i] for i in leaf.parameters]
        outputs = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
        with self._lock:
            self._sweep()
            looked_at = self._looks_at(leaf)
            given, made = Stores(tensors), Stores(outputs)
            saved, leaves = held_upstream(tensors) if looked_at else ([], [])
            own = self._made(autograd.saved_by_function(node), made, given)
            run = Run(
                leaf, weakref.ref(node), own.largest(), given, made, Stores(saved),
                [weakref.ref(p) for p in parameters], looked_at or own.largest() is None,
            )  # fmt: skip
            if looked_at:
                leaf.know([*parameters, *leaves])
                leaf.buffers.add(args[i] for i in leaf.module_tensors)
            if not leaf.runs:
                self._note_held(leaf, own, made, given)
            leaf.runs += 1
            self._live.append(run)
            if self._chains:
                self._chains[-1].leaves[leaf] += 1
        if run.looked_at:  # a hook holds the gradients that it is given, and is not to stay
            node.register_prehook(lambda *_: self._backward(run))

    def _looks_at(self, leaf: Leaf) -> bool:
        beside = leaf.situations.get(self._others())
        alone = all(other.origin is leaf.origin for chain in self._chains for other in chain.leaves)
        alone = alone and not self._live
        return beside is None or beside.times < (LOOKS_ALONE if alone else LOOKS)

    @staticmethod
    def _made(saved: Iterable[torch.Tensor], made: Stores, given: Stores) -> Stores:
        """What was made in the run and is neither an output nor an input."""
        own = Stores(saved)
        own.drop(made)
        own.drop(given)
        return own

    def _others(self, run: Run | None = None) -> frozenset[tuple[Leaf, int]]:
        """The runs that wait for their backward, beside `run`."""
        return frozenset(Counter(r.leaf for r in self._live if r is not run).items())

    def _note_held(self, leaf: Leaf, own: Stores, made: Stores, given: Stores) -> None:
        there = given.alive()
        for run in self._live:
            there.update(run.outputs.alive())
        leaf.outputs = sum(size for key, size in made.alive().items() if key not in there)
        leaf.held = leaf.outputs + sum(own.alive().values())

    def _backward(self, run: Run) -> None:
        """A run's backward is about to begin."""
        running = autograd.running_backward()
        with self._lock:
            self._sweep()
            self._after_backward = True
            if run.looked_at:
                if running is not None:
                    self._note_loss(run, running)
                self._note_beside(run)
            if running is None or not running.keeps:
                run.done = True

    def _note_loss(self, run: Run, running: autograd.RunningBackward) -> None:
        node, leaf = run.node(), run.leaf
        if leaf.outputs and sum(run.outputs.alive().values()) and not leaf.keeps_outputs:
            leaf.keeps_outputs = leaf.news = True
        if not leaf.seen:
            leaf.seen = leaf.news = True
        if not any(n is node for n in autograd.walk(running.roots, autograd.is_compiled)):
            return
        found, before = loss_of(running.roots, autograd.is_compiled), leaf.loss
        leaf.know(found.leaves)
        most = EagerLoss(
            max(before.forward_bytes, found.forward_bytes), max(before.held_bytes, found.held_bytes),
            max(before.backward_bytes, found.backward_bytes),
            reads_outputs=before.reads_outputs or found.reads_outputs,
        )  # fmt: skip
        if most != before:
            leaf.loss, leaf.news = most, True

    def _note_beside(self, run: Run) -> None:
        leaf = run.leaf
        others = [r for r in self._live if r is not run]
        key = self._others(run)
        there = Stores()
        for r in (run, *others):
            there.update(r.inputs)
            there.update(r.eager)
        parameters = self._parameters()
        known = Stores(parameters).alive()
        gradients = Stores([p.grad for p in parameters if p.grad is not None]).alive()
        for r in (run, *others):
            known.update(r.outputs.alive())
            known.update(r.leaf.buffers.alive())
        bytes_of_gradients = sum(size for key_, size in gradients.items() if key_ not in known)
        other = sum(size for key_, size in there.alive().items() if key_ not in known and key_ not in gradients)
        if leaf.situations.setdefault(key, Beside()).widen(bytes_of_gradients, other):
            leaf.news = True

    def _sweep(self) -> None:
        live = [run for run in self._live if not run.is_over()]
        self._after_backward |= len(live) < len(self._live)
        self._live = live
