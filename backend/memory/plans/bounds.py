"""What plans of the graphs of a step come to, and the sums of it that must fit: one bound for each situation seen.

A graph needs one thing while it runs and another while its loss does, which lies between its forward and its backward.
The loss of a graph that runs several times runs once, when all of the runs wait for their backward: what it needs is
part of the bound of that situation, and not of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optpass.passes.memory.search.schedule import FrozenState

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """One plan of one graph.

    Attributes:
        peak: bytes while its backward runs, above what is held beside it.
        held: bytes that it holds from its forward to its backward.
        seconds: of what it computes again.
        handed, later: what is there of it while its loss runs forward, and backward; None for `held`.
        forward: bytes while its forward runs.
        reads: bytes of what callers gave it that its backward reads, parameters aside.
        returns: bytes of its outputs that it has saved, too.
        state: of the search, where known.
    """

    peak: int
    held: int
    seconds: float
    handed: int | None = None
    later: int | None = None
    forward: int = 0
    reads: int = 0
    returns: int = 0
    state: FrozenState | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Bound:
    """`fixed` + what the `others` hold + what `graph` needs, itself or with its loss, must be at most `limit`.

    Callers had let go of outputs of the others when the situation was seen, which `fixed` is less for: plans that save
    them, or of a graph that was given them and reads them, hold them on.

    Attributes:
        graph: index.
        others: (index, number of runs).
        since_loss: part of `fixed` that is there from the loss on; negative where something has gone by then.
        loss: bytes that the loss needs in its forward and in its backward, above `fixed` and what is there of the
            graph.
        before: bytes that are there in the forward above `fixed`; negative for less.
        gone: bytes of outputs of the others that were gone in the backward.
        handed_on: those of them that had been given to graphs, by index.
    """

    graph: int
    others: tuple[tuple[int, int], ...]
    fixed: int
    limit: int
    since_loss: int = 0
    loss: tuple[int, int] = (0, 0)
    before: int = 0
    gone: int = 0
    handed_on: Mapping[int, int] = field(default_factory=dict)

    def needed(self, choice: Choice) -> int:
        """Bytes of the graph with this plan, above what is held beside it."""
        backward = choice.peak + self.holds_on(self.graph, choice)
        return max(choice.forward + self.before, backward, self.with_loss(choice))

    def with_loss(self, choice: Choice) -> int:
        """The same while its loss runs."""
        handed = choice.held if choice.handed is None else choice.handed
        later = choice.held if choice.later is None else choice.later
        return max(handed + self.loss[0], later + self.holds_on(self.graph, choice) + self.loss[1])

    def waiting(self, graph: int, times: int, choice: Choice) -> int:
        """Bytes of so many runs of another graph with this plan."""
        returned = 0 if graph == self.graph else self.holds_on(graph, choice)
        return choice.held * times + returned + min(self.gone, choice.returns * times)

    def holds_on(self, graph: int, choice: Choice) -> int:
        """Bytes that were gone, and are not with this plan of a graph that was given them and reads them."""
        return min(self.handed_on.get(graph, 0), choice.reads)


def plan_excess(chosen: Sequence[Choice], bounds: Sequence[Bound]) -> Ints:
    """Bytes that each bound is broken by."""
    return np.array([total(chosen, bound) - bound.limit for bound in bounds], dtype=np.int64)


def excess(chosen: Sequence[Choice], bounds: Sequence[Bound]) -> int:
    """Bytes that the worst bound is broken by; negative where there is room in all."""
    return max((total(chosen, bound) - bound.limit for bound in bounds), default=0)


def total(chosen: Sequence[Choice], bound: Bound) -> int:
    """The sum that a bound limits."""
    return beside(chosen, bound) + bound.needed(chosen[bound.graph])


def beside(chosen: Sequence[Choice], bound: Bound) -> int:
    """The part of it that does not depend on the plan of the bound's own graph."""
    return bound.fixed + sum(bound.waiting(g, n, chosen[g]) for g, n in bound.others)
