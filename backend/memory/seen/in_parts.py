"""Steps in parts, each with a backward and an optimizer of its own, as a generator and its critic are trained: what one
part leaves there for the next, and in the next step for that before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_callers import Place, places_of_backward
from optpass.backend.compat.memory_clears import ToCome
from optpass.backend.memory.seen.late import Clearing
from optpass.backend.memory.seen.parameters import alive, parameters_of
from optpass.backend.memory.versions import first_trained, version_of
from optpass.passes.wrappers import nbytes_of

if TYPE_CHECKING:
    from optpass.backend.memory.seen.leaves import Leaf
    from optpass.backend.memory.seen.run import Run


@dataclass(frozen=True)
class Asked:
    """Where a backward of a graph was asked for.

    Attributes:
        places: the functions of the program.
        trained, version: a parameter, weakly, by whose version it is told whether an optimizer has stepped.
    """

    places: tuple[Place, ...]
    trained: weakref.ref[torch.Tensor] | None
    version: int

    @classmethod
    def at(cls, run: Run) -> Asked:
        """The backward of `run` that begins."""
        first = first_trained(alive(run.parameters))
        version = 0 if first is None else version_of(first)
        return cls(tuple(places_of_backward()), None if first is None else weakref.ref(first), version)

    def has_stepped(self) -> bool:
        """Whether an optimizer has since."""
        first = None if self.trained is None else self.trained()
        return first is not None and version_of(first) != self.version

    def is_before(self, now: ToCome) -> bool:
        """Whether what is to come is of the same step: of the same function, further on in it, or of another method of
        the same object."""
        same = [place for place in self.places if place.code is now.place.code]
        if same:
            return any(place.at < now.place.at for place in same)
        return now.place.first is not None and any(place.first == now.place.first for place in self.places[:1])


@dataclass(frozen=True)
class Graded:
    """When a backward of a graph began, by the identity of parameters.

    Attributes:
        own: whose gradients it makes.
        there: bytes of gradients of others that were there.
        made: of others, whose gradients are made in the same backward.
    """

    own: frozenset[int]
    there: Mapping[int, int]
    made: frozenset[int]


def graded_at(run: Run, running: autograd.RunningBackward | None, leaves: Iterable[Leaf]) -> Graded | None:
    """Of all that `leaves` know, when a backward of `run` begins."""
    if running is None:
        return None
    leaves_made = (autograd.leaf_of(node) for node in autograd.walk(running.roots, lambda _: False))
    made = frozenset(id(p) for p in leaves_made if p is not None)
    own = made.intersection(id(reference()) for reference in run.parameters)
    there = {id(p): nbytes_of(p.grad) for p in parameters_of(leaves) if p.grad is not None and id(p) not in own}
    return Graded(own, there, made - own)


def note_staying(leaf: Leaf, step: Sequence[Leaf], clearing: Clearing, own: Set[int] | None = None) -> None:
    """A step begins, of these graphs: gradients that are there now, and were not when it was looked at what is beside
    one of them, are there in its backward, unless they are cleared first.

    Args:
        own: parameters that it is called with, by identity: modules that are alike share a graph.
    """
    graded = leaf.graded
    own = own or (graded.own if graded is not None else frozenset())
    if graded is not None and _is_to_run(leaf, own, clearing):
        leaf.graded = None
        cleared = clearing.before(own, leaf.clears.places)
        now = {id(p): nbytes_of(p.grad) for p in parameters_of(step) if p.requires_grad and p.grad is not None}
        if cleared is not None:
            stay = {key: size for key, size in now.items() if key not in graded.made and key not in cleared}
            there = {key: size for key, size in {**graded.there, **stay}.items() if key not in own}
            leaf.note_staying(max(0, sum(there.values()) - sum(graded.there.values())))
    leaf.note_late(clearing.bytes)


def _is_to_run(leaf: Leaf, own: Set[int], clearing: Clearing) -> bool:
    """Whether that step is one that its plan serves: begins with gradients of its own there, or without."""
    there = any(p.grad is not None for p in parameters_of([leaf]) if id(p) in own)
    return leaf.gradients == (there and not clearing.clears(own, leaf.clears.places))
