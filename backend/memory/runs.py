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
from optpass.backend.memory.partition import BudgetPartitioner
from optpass.backend.memory.tail import Tail
from optpass.options import Options
from optpass.passes.memory.plan import Ledger
from optpass.passes.memory.schedule import FrozenState

#: Chains of runs that are remembered, to find which of them make up one step.
REMEMBERED = 64
#: How often a graph is looked at beside the same other runs: where nothing else runs, once says all.
LOOKS_ALONE, LOOKS = 1, 2


@dataclass
class Beside:
    """What is held beside a graph in its backward, in bytes; the most seen.

    Attributes:
        times: how often it was seen.
        gradients: of all parameters known.
        other: inputs of this graph and of those that wait for their backward, and what eager operators saved.
    """

    gradients: int = 0
    other: int = 0
    times: int = 0

    def widen(self, gradients: int, other: int) -> bool:
        """Take in what was seen; whether it is more."""
        self.times += 1
        more = gradients > self.gradients or other > self.other
        self.gradients, self.other = max(self.gradients, gradients), max(self.other, other)
        return more


@dataclass(frozen=True)
class Share:
    """What one graph may use in a step that has been seen.

    Attributes:
        statics: what is held beside it, of all that was seen the most.
        tail: what happens between its forward and its backward; None where that was not seen.
        follow: bytes that are needed on top of what it holds while other graphs run.
        at_optimizer: peak while the optimizer steps.
        optimizer: its name.
        state: of the search, that was chosen; with the number of operations of its graph.
    """

    statics: Ledger
    tail: Tail | None = None
    follow: int = 0
    at_optimizer: int = 0
    optimizer: str = "none"
    state: tuple[int, FrozenState] | None = None


@dataclass(eq=False)
class Leaf:
    """One compiled graph with one plan.

    Attributes:
        partitioner: what decided the plan.
        origin: the same for all plans of one graph.
        options: of its compile.
        parameters, module_tensors: positions among its arguments: of parameters, and of other tensors of modules.
        buffers: the latter, of all calls.
        known: parameters that its runs were given or that eager code around them reads, weakly, by identity.
        situations: what was held beside it, by the other runs that waited for their backward then.
        held: bytes that it holds from forward to backward, outputs included; the most seen.
        outputs: bytes of its outputs; part of `held`.
        loss: what eager code does between its outputs and the scalar that is differentiated; nothing where other
            graphs come between.
        seen: a backward of it was seen, so that `loss` and `keeps_outputs` are known.
        keeps_outputs: an output was still held by the caller in its backward.
        runs: calls with gradients.
        share: what it may use from its next call on, where that has changed.
        next: the leaf that took its place.
        generation: how many leaves it has taken the place of.
        news: something was seen since the plans were last looked at.
    """

    partitioner: BudgetPartitioner
    origin: object
    options: Options
    parameters: tuple[int, ...] = ()
    module_tensors: tuple[int, ...] = ()
    buffers: Stores = field(default_factory=lambda: Stores())
    known: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    situations: dict[frozenset[tuple[Leaf, int]], Beside] = field(default_factory=dict)
    held: int = 0
    outputs: int = 0
    loss: EagerLoss = field(default_factory=EagerLoss)
    seen: bool = False
    keeps_outputs: bool = False
    runs: int = 0
    share: Share | None = None
    next: Leaf | None = None
    generation: int = 0
    news: bool = True

    def know(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters that take part in a step with this graph."""
        for parameter in parameters:
            reference = self.known.get(id(parameter))
            if reference is None or reference() is not parameter:
                self.known[id(parameter)] = weakref.ref(parameter)

    def succeed(self, leaf: Leaf) -> None:
        """Take the place of `leaf`, and take over what was seen of it."""
        leaf.next, self.generation = self, leaf.generation + 1
        self.known, self.situations, self.buffers = dict(leaf.known), dict(leaf.situations), leaf.buffers
        self.loss, self.seen, self.keeps_outputs = leaf.loss, leaf.seen, leaf.keeps_outputs

    def latest(self) -> Leaf:
        """What stands for it now."""
        leaf = self
        while leaf.next is not None:
            leaf = leaf.next
        return leaf


class Stores:
    """Weak references to the storages behind tensors, each once."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._found: dict[int, Any] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take in what is behind `tensors`."""
        for tensor in tensors:
            for part in _plain(tensor):
                storage = part.untyped_storage()
                self._found.setdefault(storage._cdata, weakref.ref(storage))

    def update(self, other: Stores) -> None:
        """Take in those of `other`."""
        for key, reference in other._found.items():
            self._found.setdefault(key, reference)

    def drop(self, other: Stores) -> None:
        """Leave out those of `other`."""
        for key in other._found:
            self._found.pop(key, None)

    def largest(self) -> weakref.ref[Any] | None:
        """The one of the most bytes; None where there is none."""
        sizes = self.alive()
        return self._found[max(sizes, key=lambda key: sizes[key])] if sizes else None

    def alive(self) -> dict[int, int]:
        """Bytes of each that has not been released."""
        found = {}
        for key, reference in self._found.items():
            storage = reference()
            if storage is not None:
                found[key] = storage.nbytes()
        return found


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor] if tensor.layout == torch.strided else []
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(tensor, name))]


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


def parameters_of(leaves: Iterable[Leaf]) -> list[torch.Tensor]:
    """All parameters that `leaves` know, as far as they are alive, each once."""
    found = {key: reference() for leaf in leaves for key, reference in leaf.known.items()}
    return [parameter for parameter in found.values() if parameter is not None]
