"""What one graph may use of a budget, once the step has been seen whose graphs share it."""

from __future__ import annotations

from dataclasses import dataclass

from optpass.backend.memory.replay.tail import Tail
from optpass.passes.memory.plan import Ledger
from optpass.passes.memory.search.schedule import FrozenState


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
        whole: it was chosen beside those of other graphs, and was replayed: one that fits is not made better by itself.
        optional: the plan in force fits, too, and stays where none can be had for this.
    """

    statics: Ledger
    tail: Tail | None = None
    follow: int = 0
    at_optimizer: int = 0
    optimizer: str = "none"
    state: tuple[int, FrozenState] | None = None
    whole: bool = False
    optional: bool = False
