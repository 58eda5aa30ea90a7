"""One decision of the search, and one that it weighs. Plain data: `moves` finds them, `search` chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

from optpass.passes.memory.search.schedule import State


@dataclass(frozen=True)
class Move:
    """One decision: storages no longer kept from the forward, and storages not held across a position."""

    drop: tuple[int, ...] = ()
    evict: tuple[tuple[int, int], ...] = ()

    def apply(self, state: State) -> None:
        """Change `state`."""
        state.kept.difference_update(self.drop)
        for s, position in self.evict:
            state.evicted.setdefault(position, set()).add(s)


@dataclass
class Candidate:
    """A move at the peak.

    Attributes:
        move: computes again, and holds what it computes on the way for whoever needs it later.
        lean: the same, but lets go of what was computed on the way.
        bytes: freed at the peak.
        seconds: of computing again, predicted.
        kind: equal for tensors that play the same part in repeated layers.
        order: of the tensors in the forward.
    """

    move: Move
    lean: Move
    bytes: int
    seconds: float
    kind: tuple[int, ...]
    order: int
