"""Gradients that are cleared late: behind the forward of a step, where they are of the step before.

`loss = model(x); optimizer.zero_grad(); loss.backward()` begins each step with gradients as one of several
micro-batches does, but for the optimizer, which has stepped since, and has left what it used as it was.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from optpass.backend.compat.memory_callers import places_of_backward
from optpass.backend.compat.memory_clears import to_come
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.versions import Versions, first_trained

#: So often it is counted how much there is: in the first steps, graphs of the step become known. It is counted so often
#: again where more of the parameters have gradients than before, or fewer.
COUNTS = 3
#: So often the program's code is read for when they are cleared, where it was not seen.
LOOKS = 3
#: So often it is noted where a backward is asked for.
PLACES = 8


#: For each function that asked for backwards of a graph, where in it.
Places = Mapping[types.CodeType, Set[int]]


@dataclass(frozen=True)
class Clearing:
    """Gradients that are there when a step begins, and which of them are cleared before a backward.

    Attributes:
        bytes: of those that are there, where the graph that begins it is one whose gradients are cleared late.
        code, at: the function that asks for the next backward, and where it is.
        cleared: identities of the parameters whose gradients it clears, in order, and where; None for those of all.
        backwards: where it names what asks for a backward.
    """

    bytes: int = 0
    code: types.CodeType | None = None
    at: int = 0
    cleared: tuple[tuple[int, frozenset[int] | None], ...] = ()
    backwards: tuple[int, ...] = ()

    @classmethod
    def to_come(cls) -> Clearing:
        """As the program's code has it."""
        found = to_come()
        if found is None:
            return NOTHING
        cleared = tuple((place, _parameters_of(owner)) for place, owner in found.asked)
        return cls(0, found.place.code, found.place.at, cleared, found.backwards)

    def before(self, own: Set[int], places: Places) -> frozenset[int] | None:
        """Parameters whose gradients are cleared before a backward to those that are its `own`, of a graph whose
        backwards were asked for at `places`: where it was not seen, the first to come, unless that is of others, as a
        critic's is before its generator's. None for all."""
        seen = sorted(place for place in places.get(self.code, ()) if place > self.at) if self.code else []
        first = found = frozenset[int]()
        for number, (begin, end) in enumerate(itertools.pairwise((self.at, *(seen[:1] or self.backwards)))):
            part = [cleared for place, cleared in self.cleared if begin < place < end]
            if None in part:
                return None
            found = found.union(*(cleared for cleared in part if cleared is not None))
            first = first if number else found
            if not part or not found.isdisjoint(own):
                return found
        return first

    def clears(self, own: Set[int], places: Places) -> bool:
        """Whether gradients of its `own` are among these."""
        found = self.before(own, places)
        return found is None or not found.isdisjoint(own)


NOTHING = Clearing()


class Late:
    """Of the steps of one graph, whatever plan serves them."""

    def __init__(self) -> None:
        self._versions = Versions()
        self._seen = Stores()  #: one of those that were taken to be cleared late
        self._are_cleared: bool | None = None
        self._pending: int | None = None  #: one of the parameters then, while no backward has begun since
        self._expected = False
        self._graded = 0  #: parameters that had a gradient when they were counted last
        self._bytes, self._counts, self._looks = 0, COUNTS, LOOKS
        self._to_come = NOTHING
        self._places_left = PLACES
        self.places: dict[types.CodeType, set[int]] = {}
        self._inside: list[Clearing] = []

    @contextlib.contextmanager
    def call(self, trained: Sequence[torch.Tensor], step: Callable[[], Sequence[torch.Tensor]]) -> Iterator[Clearing]:
        """Inside, the graph is called with these `trained` parameters: bytes of gradients of theirs, and of all that
        the `step` trains, that are there and likely to be gone before the backward. A plan that serves for another asks
        again, inside, and is told the same."""
        self._inside.append(self._inside[-1] if self._inside else self._gradients(trained, step))
        try:
            yield self._inside[-1]
        finally:
            self._inside.pop()

    def are_expected(self, trained: Sequence[torch.Tensor]) -> bool:
        """Whether the next call with these `trained` parameters is beside gradients that are on their way out."""
        before, now = self._versions.look(trained)
        self._read(before, now)
        return self._one_of_them(trained, before, now) is not None

    def _read(self, before: int | None, now: int | None) -> None:
        """Read what the program is to clear, where an optimizer has stepped and it was not seen."""
        if before is not None and before != now and self._are_cleared is None:
            self._to_come = Clearing.to_come() if self._looks else NOTHING
            self._looks = max(0, self._looks - 1)

    def _gradients(self, trained: Sequence[torch.Tensor], step: Callable[[], Sequence[torch.Tensor]]) -> Clearing:
        before, now = self._versions.note(trained)
        self._read(before, now)
        if before == now and self._pending == id(first_trained(trained)) and self._seen.bytes():
            return replace(self._to_come, bytes=self._bytes)  # another run of the step, before its first backward
        one = self._one_of_them(trained, before, now)
        if one is None:
            there = [p.grad for p in trained if p.grad is not None]
            if there and before not in (None, now) and self._are_cleared is None:  # by a function that was not read
                self._seen, self._pending, self._expected = Stores(there[:1]), id(first_trained(trained)), False
            return self._to_come
        self._seen, self._pending, self._expected = Stores([one]), id(first_trained(trained)), True
        graded = sum(p.grad is not None for p in trained)
        if graded != self._graded:
            self._graded, self._counts = graded, COUNTS
        if self._counts:
            self._counts -= 1
            self._bytes = Stores(p.grad for p in (*trained, *step()) if p.grad is not None).bytes()
        return replace(self._to_come, bytes=self._bytes)

    def begin_backward(self) -> None:
        """The backward of a run of the graph begins: whether they are gone."""
        if self._pending is not None:
            self._are_cleared, self._pending = not self._seen.bytes(), None
        if self._places_left:
            self._places_left -= 1
            for place in places_of_backward():
                self.places.setdefault(place.code, set()).add(place.at)

    def _one_of_them(self, trained: Sequence[torch.Tensor], before: int | None, now: int | None) -> torch.Tensor | None:
        """None where no optimizer has stepped since the last call. The first time, where the program clears gradients
        between this call and the backward, and has not made them zero; then, where they were gone by then."""
        found = [p.grad for p in trained if p.grad is not None]
        if before is None or before == now or not found:
            return None
        if self._expected and self._pending == id(first_trained(trained)) and self._seen.bytes():
            self._are_cleared = False
        if self._are_cleared is False:
            return None
        smallest = min(found, key=lambda gradient: gradient.numel() or 1 << 62)
        if self._are_cleared is None:
            cleared = self._to_come.clears({id(p) for p in trained}, self.places)
            return smallest if cleared and _holds_numbers(smallest) else None
        return smallest


def _parameters_of(owner: Any) -> frozenset[int] | None:
    """Parameters whose gradients it clears, by identity; None for those of all, where it is neither an optimizer nor a
    module."""
    if issubclass(type(owner), torch.optim.Optimizer):
        return frozenset(id(p) for group in owner.param_groups for p in group["params"])
    return frozenset(id(p) for p in owner.parameters()) if issubclass(type(owner), nn.Module) else None


def _holds_numbers(gradient: torch.Tensor) -> bool:
    """Whether it is a plain tensor, of values that are not all zero."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and bool(gradient.any())
