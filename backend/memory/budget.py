"""What one graph may use of a step's budget, and what is known of the step around it. `partition` plans with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optpass.backend.memory.replay.tail import Tail
from optpass.passes.memory.plan import Ledger
from optpass.passes.memory.search.schedule import FrozenState

#: Scalars: the gradient that `loss.backward()` begins with, and what autograd makes of it; those of an optimizer.
ENGINE_BYTES = 64


@dataclass(frozen=True)
class Budget:
    """What one graph may use.

    Attributes:
        bytes: the budget of the step, everything counted.
        statics: what is there throughout the step.
        at_optimizer: peak while the optimizer steps, which no plan changes; bytes, all counted.
        ahead: the same while a graph without gradients runs that comes before it in the step, such as a teacher.
        optimizer: its name, for messages.
        trained_itemsize: bytes per element of most parameters.
        shared: more graphs follow in the same step, or calls of it, or other code that trains parameters, which nobody
            has seen yet: what can be is left to them.
        followed: it is since something else than calls of it follows.
        to_come: calls of it that may follow in the same step before its backward.
        again: a checkpoint runs it again in the backward, and holds nothing of it until then.
        to_accumulate: bytes of its own gradients, which are there throughout from the second micro-batch of a step on;
            none where that has been seen.
        tail: what happens between its forward and its backward, where that has been seen.
        follow: bytes that are needed on top of what it holds while other graphs of the step run.
        state: a state of the search that was chosen for the step as a whole; with the number of operations.
        whole: as in `Share`.
        settled: it is for a step that was seen.
        lenient: where nothing fits, the plan beside which most is left is taken: the step is under way, and the next
            one is planned anew.
        around: elements and bytes of tensors that the caller holds and the graph does not read: its loss may.
        taught: graphs without gradients have returned as much as it does: its loss may read that.
        handed: positions and bytes of inputs that earlier graphs of the step returned and do not read again: they go
            with their last holder.
        held: what calls the step holds the outputs until it asks for the backward; None where that is not known.
        apart: it is of one of several modules that are compiled on their own; what those have that did not run yet.
        elsewhere: bytes of the statics that are of frozen models which the graph does not read, and of what the program
            changes by hand from step to step; for messages.
        likely: the floor where graphs that follow train what it does not, as is likely; for messages, 0 where known.
        batch: samples that the graph is given at once, where its inputs say so; for messages.
        where: what set the budget, for messages.
        notes: what was assumed.
    """

    bytes: int
    statics: Ledger
    at_optimizer: int = 0
    ahead: int = 0
    optimizer: str = "none"
    trained_itemsize: int = 4
    shared: bool = False
    followed: bool = False
    to_come: int = 0
    again: bool = False
    to_accumulate: int = 0
    tail: Tail | None = None
    follow: int = 0
    state: tuple[int, FrozenState] | None = None
    whole: bool = False
    settled: bool = False
    lenient: bool = False
    around: tuple[tuple[int, int], ...] = ()
    taught: bool = False
    handed: tuple[tuple[int, int], ...] = ()
    held: bool | None = True
    apart: Ledger | None = None
    elsewhere: int = 0
    likely: int = 0
    batch: int | None = None
    where: str = ""
    notes: tuple[str, ...] = ()

    def with_more(self, size: int) -> Budget:
        """The same where `size` bytes more are there throughout, of nobody's."""
        ahead = self.ahead and self.ahead + size
        statics = self.statics.plus(Ledger(temporaries=size))
        return replace(self, statics=statics, at_optimizer=self.at_optimizer + size, ahead=ahead)
