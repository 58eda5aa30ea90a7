"""One call of a compiled graph with a memory budget."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held
from optpass.backend.compat.memory_callers import tensors_of_callers
from optpass.backend.memory.eager.timeline import Shapes
from optpass.backend.memory.replay.tail import GENERATOR_BYTES
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.stores import Stores, storages_of
from optpass.passes.memory.transfers import is_on_host


@dataclass(eq=False)
class Run:
    """One call of a leaf whose backward has not run.

    Attributes:
        node: of autograd.
        released: a storage that autograd releases with the backward, as far as there is one.
        inputs, outputs, eager: storages of its arguments and results, and of what eager operators before it saved.
        leaves: other arguments, weakly, that a backward leaves a gradient at, as where a graph is cut by `detach`; and
            those of runs behind it, of which the gradient is what its own backward begins with.
        shapes: of its arguments, parameters aside.
        gradients: storages of those that were there in its forward, and their bytes.
        made: storages of its outputs, and their bytes.
        looked_at: what is beside it in its backward is to be noted.
        gone_before: bytes of outputs of the runs before it that callers had let go of when it began.
        let_go: its outputs that were released: the place of the next node of autograd, and their bytes.
        let_go_before: how many of these were before the backward began.
        cleared: of `gradients`, likewise.
        old: what earlier runs and the eager code behind them have returned that was there in its forward, and has been
            released, likewise: variables of a loop are, when they are assigned anew.
        graded: what its caller has made since an earlier backward of it, which left it for another one.
        results: of eager code, large ones that the caller holds in its backward.
        older: results of eager code that were made before it, and are held in its backward.
        among: bytes of those that were made behind it, but before the last run that waited in its backward.
        behind: bytes that a graph without gradients needed that ran behind it, with what was there beside it.
        behind_at: the place of the node of autograd that was next then.
        behind_made: what it returned, and `behind_there` with what was there beside it, in bytes.
        behind_saved: what eager operators had saved by then, in bytes.
    """

    leaf: Leaf
    node: weakref.ref[Any]
    released: Any
    inputs: Stores
    outputs: Stores
    eager: Stores
    parameters: list[weakref.ref[torch.Tensor]]
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    shapes: Shapes = ()
    looked_at: bool = True
    gone_before: int = 0
    gradients: list[tuple[Any, int]] = field(default_factory=list)
    made: list[tuple[Any, int]] = field(default_factory=list)
    done: bool = False
    let_go: list[tuple[int, int]] = field(default_factory=list)
    let_go_before: int = 0
    cleared: list[tuple[int, int]] = field(default_factory=list)
    old: list[tuple[int, int]] = field(default_factory=list)
    results: Stores = field(default_factory=Stores)
    graded: Stores = field(default_factory=Stores)
    older: Stores = field(default_factory=Stores)
    among: int = 0
    behind: int = 0
    behind_at: int = 0
    behind_made: list[tuple[Any, int]] = field(default_factory=list)
    behind_there: int = 0
    behind_saved: int = 0
    _held: Stores | None = None
    _watched: list[Any] = field(default_factory=list, repr=False)

    def watch(self, old: Stores, gradients: Stores) -> None:
        """Note when callers let go of its outputs, of `old` ones, and of `gradients` that are there."""
        self.gradients = gradients.sizes()
        for stores, noted in ((self.outputs, self.let_go), (old, self.old), (gradients, self.cleared)):
            for storage in stores.storages():
                if not self.inputs.has(storage):
                    self._watched.append(weakref.ref(storage, functools.partial(_note, noted, storage.nbytes())))

    def begin_backward(self, *, keeps: bool) -> None:
        """Its backward begins, and `keeps` what is saved for another one: what `torch.autograd.grad` has given to the
        caller by then is there, too."""
        self.done = not keeps
        if self.looked_at and (keeps or self._held is not None):
            held = Stores(t for t in tensors_of_callers() if t.grad_fn is None)
            if self._held is None:
                self._held = held
            else:
                held.drop(self._held)
                self.graded = held

    def ungraded(self, there: int, needed: int, result: Any) -> None:
        """A graph without gradients has run behind it and needed so many bytes, beside what was there less what its
        caller had let go of, and has returned `result`."""
        if there + needed > self.behind:
            self.behind, self.behind_at = there + needed, autograd.next_order()
            tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.behind_made = Stores(tensors).sizes()
            self.behind_there = there + sum(size for _, size in self.behind_made)

    def behind_again(self, early: int) -> int:
        """Bytes while the caller reads what the graph without gradients has returned, as it has read the outputs of
        this run before: those are as many and as large, and the caller has let go of them since.

        Args:
            early: bytes that the operators allocate which did that.
        """
        alike = sorted(size for _, size in self.made) == sorted(size for _, size in self.behind_made)
        read = bool(self.behind_made) and all(storage() is None for storage, _ in self.behind_made)
        return self.behind_there + self.behind_saved + early if alike and read else 0

    def note_saved(self, known: Mapping[int, Held], counted: Stores) -> None:
        """Note what eager nodes hold that were there when a graph without gradients ran behind it.

        Args:
            known: what nodes hold, by their places.
            counted: what counts otherwise.
        """
        if self.behind:
            saved = [ref() for place, one in known.items() if place < self.behind_at for ref in one.storages]
            own = {s._cdata: s.nbytes() for s in saved if s is not None and not counted.has(s)}
            self.behind_saved = sum(own.values())

    def gradients_of_leaves(self) -> list[torch.Tensor]:
        """What earlier backwards have left at its `leaves`."""
        found = [leaf for reference in self.leaves if (leaf := reference()) is not None]
        return [leaf.grad for leaf in found if leaf.grad is not None]

    def late(self, now: int) -> int:
        """Bytes of gradients by which its forward had more beside it than are there `now`, since those that were there
        have been released (`zero_grad`)."""
        gone = sum(size for storage, size in self.gradients if storage() is None)
        there = sum(size for _, size in self.gradients) - gone
        return max(0, gone - max(0, now - there))

    def released_outputs(self) -> int:
        """Bytes of its outputs that are not there any more."""
        return max(0, self.leaf.outputs - self.outputs.bytes())

    def handed_on(self, to: Sequence[Run]) -> dict[Leaf, int]:
        """Bytes of the same that some of the runs `to` were given, by their graphs."""
        gone = [(storage, size) for storage, size in self.made if storage() is None]
        found: dict[Leaf, int] = {}
        for run in to if gone else ():
            size = sum(size for storage, size in gone if run is not self and run.inputs.had(storage))
            found[run.leaf] = max(size, found.get(run.leaf, 0))
        return {leaf: size for leaf, size in found.items() if size}

    def is_over(self) -> bool:
        """Its backward has run, or nobody can ask for it any more."""
        if self.done or self.node() is None:
            return True
        return self.released is not None and self.released() is None


def _note(let_go: list[tuple[int, int]], size: int, _: Any) -> None:
    let_go.append((autograd.next_order(), size))


def leaves_of(tensors: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> list[weakref.ref[torch.Tensor]]:
    """Those of `tensors` that are no `parameters` and at which a backward leaves a gradient."""
    known = {id(p) for p in parameters}
    return [weakref.ref(t) for t in tensors if id(t) not in known and t.requires_grad and t.is_leaf]


def own_storages(saved: Iterable[torch.Tensor], made: Stores, given: Stores) -> Stores:
    """What was made in a run and is neither an output nor an input, of what it has saved."""
    own = Stores(tensor for tensor in saved if not is_on_host(tensor))
    own.drop(made)
    own.drop(given)
    return own


def largest_own(saved: Iterable[torch.Tensor], made: Stores, given: Stores) -> weakref.ref[Any] | None:
    """The largest of `own_storages`, weakly; None where there is none."""
    most, found = -1, None
    for tensor in saved:
        for storage in () if is_on_host(tensor) else storages_of(tensor):
            size = storage.nbytes()
            if size > most and not made.has(storage) and not given.has(storage):
                most, found = size, storage
    return None if found is None else weakref.ref(found)


def note_held(leaf: Leaf, own: Stores, made: Stores, given: Stores, waiting: Iterable[Run]) -> None:
    """Bytes that a run of `leaf` holds from its forward to its backward, and of these its outputs.

    Args:
        own, made, given: what it made and saved, its outputs and its inputs.
        waiting: the runs before it.
    """
    there = given.alive()
    for run in waiting:
        there.update(run.outputs.alive())
    leaf.outputs = sum(size for key, size in made.alive().items() if key not in there)
    leaf.held = leaf.outputs + own.bytes() + (GENERATOR_BYTES if leaf.again else 0)
