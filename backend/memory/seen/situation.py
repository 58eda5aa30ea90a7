"""One situation of a step: what was seen beside a run of a compiled graph while certain others waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpass.backend.memory.seen.stores import Stores

if TYPE_CHECKING:
    from optpass.backend.memory.seen.leaves import Leaf


#: A loss that needs less than was expected by no more than this part of what is there is no news.
NEAR = 0.01


@dataclass
class Beside:
    """What is held beside a graph in its backward, in bytes; the most seen.

    Attributes:
        times: how often it was seen.
        gradients: of all parameters known.
        other: inputs of this graph and of those that wait for their backward, what eager operators saved, and what
            earlier runs have returned that is still there; `lasting` without these.
        since_loss: what is there from the loss on: results that the caller holds, less outputs of others that are gone.
        in_loss, in_loss_backward: all of these and the loss, in the forward of the loss and in its backward.
        expected: of gradients, what is likely to be there when it is seen next, and was not.
        left: of `other`, what is likely to be there of graphs without gradients when it is seen next, and was not.
        repeated: of `in_loss`, what is likely to be there of the step before when it is seen next, and was not:
            gradients that are cleared late, if that is behind the loss, and of `results` so many bytes.
        late: of gradients, how many more were there in its forward, and in that of the loss, and cleared since.
        lent: of `other`, what was lent to graphs without gradients.
        made: of gradients, what the loss has made of its own parameters, which is not there in its forward.
        waiting: of `other`, gradients that the running backward has made for nodes that are still to run, at least.
        gone, handed_on: outputs of others that were gone, and those of them that graphs had been given, by graph.
    """

    gradients: int = 0
    other: int = 0
    lasting: int = 0
    since_loss: int | None = None
    in_loss: int = 0
    in_loss_backward: int = 0
    expected: int = 0
    left: int = 0
    repeated: int = 0
    results: int = 0
    late: int = 0
    gone: int = 0
    handed_on: Mapping[Leaf, int] = field(default_factory=dict)
    lent: Stores = field(default_factory=Stores)
    made: int = 0
    waiting: int = 0
    times: int = 0

    @property
    def most(self) -> int:
        """What is beside a graph from the loss on."""
        return self.gradients + self.other + (self.since_loss or 0)

    @property
    def behind(self) -> int:
        """What the loss needs in its backward."""
        return self.in_loss_backward - self.most

    @property
    def old(self) -> int:
        """What is counted of what earlier runs have returned."""
        return self.other - self.lasting

    def widen(
        self, gradients: int, other: int, since_loss: int, in_loss: int, in_loss_backward: int, old: int = 0,
        late: int = 0, waiting: int = 0,
    ) -> bool:  # fmt: skip
        """Take in what was seen, with `old` bytes that earlier runs have returned; whether it is more."""
        before = self.most, self.gradients, self.in_loss_backward, self.late
        in_loss_before = self.in_loss
        if self.expected:
            self.grow(-self.expected, gradients=True)
            self.expected = 0
        self.in_loss, self.repeated, self.results = self.in_loss - self.repeated, 0, 0
        self.grow(-self.left)
        self.left = 0
        self.waiting = min(self.waiting, waiting) if self.times else waiting
        self.times += 1
        self.since_loss = since_loss if self.since_loss is None else max(self.since_loss, since_loss)
        self.gradients, self.other = max(self.gradients, gradients), max(self.other, other)
        self.lasting = max(self.lasting, other - old)
        self.in_loss, self.in_loss_backward = max(self.in_loss, in_loss), max(self.in_loss_backward, in_loss_backward)
        self.late = max(self.late, late)
        less = in_loss_before - self.in_loss
        changed = before != (self.most, self.gradients, self.in_loss_backward, self.late)
        return changed or less < 0 or less > NEAR * self.in_loss

    def note_late(self, late: int) -> bool:
        """So many bytes of gradients will be there until the loss has run, and not behind it; whether it is news."""
        more = max(0, late - self.late)
        old = self.made if more and not self.late else 0  # those of its own parameters are there in its forward, too
        self.late += more
        self._repeat(more + old)
        return more > 0

    def expect(self, gradients: int) -> None:
        """So many bytes of gradients are likely to be there when it is seen next."""
        self.grow(gradients, gradients=True)
        self.expected += gradients

    def expect_left(self, more: int) -> None:
        """So many bytes more are likely to be there of graphs without gradients when it is seen next."""
        self.grow(more)
        self.left += more

    def expect_results(self, size: int) -> None:
        """So many bytes more are likely to be needed while its loss runs when it is seen next, for results of the step
        before."""
        self._repeat(size - self.results)
        self.results = size

    def _repeat(self, more: int) -> None:
        self.in_loss, self.repeated = self.in_loss + more, self.repeated + more

    def grow(self, more: int, *, gradients: bool = False) -> None:
        """So many bytes are there beside the graph that were not when it was seen, or were not known to be of it."""
        if gradients:
            self.gradients += more
        else:
            self.other, self.lasting = self.other + more, self.lasting + more
        self.in_loss += more
        self.in_loss_backward += more if self.in_loss_backward else 0
