"""Gradients that are cleared late: behind the forward of a step, where they are of the step before.

`loss = model(x); optimizer.zero_grad(); loss.backward()` begins each step with gradients as one of several
micro-batches does, but for the optimizer, which has stepped since, and has left what it used as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from optpass.backend.compat.memory_calls import clears_gradients
from optpass.backend.memory.seen.parameters import first_trained
from optpass.backend.memory.seen.stores import Stores

#: So often it is counted how much there is: in the first steps, graphs of the step become known.
COUNTS = 3
#: So often the program's code is read for when they are cleared, where it was not seen.
LOOKS = 3


class Late:
    """Of the steps of one graph, whatever plan serves them."""

    def __init__(self) -> None:
        self._version: int | None = None  #: of a parameter, when the graph was called last
        self._seen = Stores()  #: one of those that were taken to be cleared late
        self._are_cleared: bool | None = None
        self._pending = False  #: no backward has begun since
        self._bytes, self._counts, self._looks = 0, COUNTS, LOOKS
        self._inside: list[int] = []

    @contextlib.contextmanager
    def call(self, trained: Sequence[torch.Tensor], step: Callable[[], Sequence[torch.Tensor]]) -> Iterator[int]:
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
        return self._one_of_them(trained, self._version, _version_of(trained)) is not None

    def _gradients(self, trained: Sequence[torch.Tensor], step: Callable[[], Sequence[torch.Tensor]]) -> int:
        before, self._version = self._version, _version_of(trained)
        one = self._one_of_them(trained, before, self._version)
        if one is None:
            return 0
        self._seen, self._pending = Stores([one]), True
        if self._counts:
            self._counts -= 1
            self._bytes = Stores(p.grad for p in (*trained, *step()) if p.grad is not None).bytes()
        return self._bytes

    def begin_backward(self) -> None:
        """The backward of a run of the graph begins: whether they are gone."""
        if self._pending:
            self._are_cleared, self._pending = not self._seen.bytes(), False

    def _one_of_them(self, trained: Sequence[torch.Tensor], before: int | None, now: int | None) -> torch.Tensor | None:
        """None where no optimizer has stepped since the last call. The first time, where the program clears gradients
        between this call and the backward, and has not made them zero; then, where they were gone by then."""
        found = [p.grad for p in trained if p.grad is not None]
        if before is None or before == now or not found:
            return None
        if self._pending and self._seen.bytes():
            self._are_cleared = False
        if self._are_cleared is False or (self._are_cleared is None and not self._looks):
            return None
        smallest = min(found, key=lambda gradient: gradient.numel() or 1 << 62)
        if self._are_cleared is None:
            self._looks -= 1
            return smallest if clears_gradients() and _holds_numbers(smallest) else None
        return smallest


def _version_of(trained: Sequence[torch.Tensor]) -> int | None:
    first = first_trained(trained)
    return None if first is None else first._version


def _holds_numbers(gradient: torch.Tensor) -> bool:
    """Whether it is a plain tensor, of values that are not all zero."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and bool(gradient.any())
