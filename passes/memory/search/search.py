"""The search: one fixed way from 'nothing changed' down to the floor, which every budget cuts at its place.

Each move lets go of a tensor where the peak is, at the best ratio of bytes freed to seconds of recomputation. The way
does not depend on the budget, so a smaller budget never gets a cheaper or a larger plan. Tensors that play the same
part in repeated layers are found by structure and moved together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from optpass.passes.memory.problem import Problem
from optpass.passes.memory.search.classes import classes_of
from optpass.passes.memory.search.known import Known, graph_key_of, key_of
from optpass.passes.memory.search.move import Candidate, Move
from optpass.passes.memory.search.moves import Finder
from optpass.passes.memory.search.refill import Plan, Refill, fastest
from optpass.passes.memory.search.schedule import Figures, Schedule, State, Timeline
from optpass.passes.memory.uncollected import uncollected

#: Storages of less than this part of the peak are not worth a decision of their own.
NEGLIGIBLE = 1e-4
#: Moves of one class that are measured together; their members are measured singly only where a budget falls.
BATCH = 64
#: Parts of the range of peaks; a frontier has about one plan in each.
_FRONTIER = 32


@dataclass(frozen=True)
class Waypoint:
    """A state on the way: the moves up to `moves`, its peak above the statics, and its recomputation."""

    moves: int
    peak: int
    seconds: float


@dataclass
class Way:
    """The moves in order, and the states between batches of them."""

    moves: list[Move] = field(default_factory=list)
    points: list[Waypoint] = field(default_factory=list)


@dataclass
class Found:
    """What a search has found: the way, the seconds of recomputation at its start, and plans upwards from it."""

    way: Way
    base_s: float
    upwards: list[Plan] | None = None


@dataclass
class Remembered:
    """What searches have found, for others to go on from.

    Attributes:
        found: by `key_of`, for problems that are equal.
        tried: by `graph_key_of`, for those that differ in what is there between their halves: what is tried is much the
            same, and only its peak is another.
    """

    found: Known[Found] = field(default_factory=Known)
    tried: Known[dict[bytes, Figures]] = field(default_factory=Known)

    def tried_of(self, graph: str) -> dict[bytes, Figures]:
        """Figures by state, to read and to add to."""
        tried = self.tried.get(graph)
        if tried is None:
            self.tried.put(graph, tried := {})
        return tried


class Search:
    """Finds the way once, and plans for any budget.

    Args:
        problem: the step.
        progress: told the peak after each batch of moves.
        known: what other searches have found.
    """

    def __init__(
        self, problem: Problem, progress: Callable[[int], None] | None = None, known: Remembered | None = None
    ) -> None:
        self.problem = problem
        self._found_for = self._now()
        graph = "" if known is None else graph_key_of(problem)
        self.schedule = Schedule(problem, None if known is None else known.tried_of(graph))
        self.classes = classes_of(problem)
        self._progress = progress or (lambda peak: None)
        made = self.schedule._forward_made
        pinned = {s for o in problem.operations if o.kept_why for s in o.outputs} | set(self.schedule.tangents)
        self._pinned = pinned
        start = State(kept=set(problem.baseline) | (pinned & made))
        self.start = start
        key = "" if known is None else key_of(problem, graph)
        found = None if known is None else known.found.get(key)
        if found is None:
            found = self._find(start)
            if known is not None:
                known.found.put(key, found)
        self._found = found
        self.way, self._base_s = found.way, found.base_s

    def _now(self) -> tuple[int, bool, bool, int, int]:
        one = self.problem
        return one.tail, one.outputs_held, one.saved_held, one.kept, one.early

    @property
    def holds(self) -> bool:
        """Whether the problem is still what the way was found for: between its halves, nothing else was put."""
        return self._now() == self._found_for

    @property
    def floor(self) -> int:
        """The smallest peak on the way, bytes above the statics."""
        return min(point.peak for point in self.way.points)

    @property
    def least(self) -> int:
        """The smallest peak of any plan that was found: one upwards from the way may need less than its end. It is not
        looked for further than was asked before."""
        return min((self.floor, *(plan.peak for plan in self._found.upwards or ())))

    @property
    def unconstrained(self) -> int:
        """The peak of the baseline, bytes above the statics."""
        return self.way.points[0].peak

    @property
    def saved_at_start(self) -> int:
        """Bytes that the baseline saves for the backward."""
        return sum(self.problem.storages[s].bytes for s in self.schedule.run(self.start).saved)

    def state_at(self, moves: int) -> State:
        """The state after so many moves."""
        state = self.start.copy()
        for move in self.way.moves[:moves]:
            move.apply(state)
        return state

    def at_most(self, peak: int) -> tuple[State, Timeline] | None:
        """The fastest plan found whose peak is at most `peak`; None where there is none."""
        found = self.on_the_way(peak)
        other = fastest(self.refilled(), peak)
        if other is None:
            return found
        if found is None or (other.seconds, other.peak) < (found[1].recomputed_s, found[1].peak):
            return other.state.copy(), self.schedule.run(other.state)
        return found

    def refilled(self, effort: float = 1.0) -> list[Plan]:
        """Plans upwards from the way, found once: from its end, from its start, and from points between. With part of
        the `effort` alone they are not remembered, nor looked for where others are."""
        if self._found.upwards is None:
            n = len(self.way.points)
            order = dict.fromkeys([n - 1, 0, *(n * i // 8 for i in (4, 2, 6, 1, 3, 5, 7)), *range(n)])
            states = (self.state_at(self.way.points[i].moves) for i in order)
            plans = Refill(self.schedule, self.classes, self._pinned, effort).from_states(states)
            if effort < 1 or not self.holds:
                return plans  # fewer than, or of another problem than, others find under it
            self._found.upwards = plans
        return self._found.upwards

    def frontier(self) -> list[tuple[int, float]]:
        """Peak and seconds of recomputation beyond the baseline's, of it and of each plan that is faster than all of
        smaller peaks. By falling peak.
        """
        plans = [(point.peak, point.seconds) for point in self.way.points]
        plans += self._between()
        plans += [(plan.peak, plan.seconds - self._base_s) for plan in self.refilled()]
        found: list[tuple[int, float]] = []
        for peak, seconds in sorted((peak, max(0.0, seconds)) for peak, seconds in plans):
            if self.floor <= peak < self.unconstrained and (not found or seconds < found[-1][1]):
                found.append((peak, seconds))
        return [(self.unconstrained, 0.0), *reversed(found)]

    def _between(self) -> list[tuple[int, float]]:
        """Peak and seconds of some plans between points of the way that are far from each other."""
        found = []
        step = max(1, (self.unconstrained - self.floor) // _FRONTIER)
        for above, below in pairwise(self.way.points):
            parts = min(below.moves - above.moves, (above.peak - below.peak) // step)
            for part in range(1, parts):
                moves = above.moves + (below.moves - above.moves) * part // parts
                timeline = self.schedule.run(self.state_at(moves))
                found.append((int(timeline.peak), timeline.recomputed_s - self._base_s))
        return found

    def on_the_way(self, peak: int) -> tuple[State, Timeline] | None:
        """The first state on the way whose peak is at most `peak`; None below the floor."""
        previous = 0
        for point in self.way.points:
            if point.peak <= peak:
                for moves in range(previous + 1, point.moves):
                    state = self.state_at(moves)
                    timeline = self.schedule.run(state)
                    if timeline.peak <= peak:
                        return state, timeline
                state = self.state_at(point.moves)
                return state, self.schedule.run(state)
            previous = point.moves
        return None

    def _finder(self, state: State, timeline: Timeline) -> Finder:
        return Finder(self.schedule, self.classes, self._pinned, state, timeline)

    # ---- the way ------------------------------------------------------------------------------------------------

    @uncollected()
    def _find(self, start: State) -> Found:
        state = start.copy()
        timeline = self.schedule.run(state)
        way = Way(points=[Waypoint(0, timeline.peak, 0.0)])
        base_s = timeline.recomputed_s
        tabu: set[tuple[object, ...]] = set()
        while True:
            step = self._step(state, timeline, tabu)
            if step is None:
                return Found(way, base_s)
            moves, state, timeline = step
            way.moves.extend(moves)
            way.points.append(Waypoint(len(way.moves), timeline.peak, timeline.recomputed_s - base_s))
            self._progress(timeline.peak)

    def _step(
        self, state: State, timeline: Timeline, tabu: set[tuple[object, ...]]
    ) -> tuple[list[Move], State, Timeline] | None:
        """The best batch of moves that lowers the peak, with what it leads to."""
        for batch in self._batches(state, timeline, tabu):
            for moves in _variants(batch):
                trial = state.copy()
                for move in moves:
                    move.apply(trial)
                after = self.schedule.run(trial)
                if after.peak < timeline.peak:
                    return moves, trial, after
            tabu.add((timeline.peak, batch[0].move))
        return None

    def _batches(self, state: State, timeline: Timeline, tabu: set[tuple[object, ...]]) -> list[list[Candidate]]:
        candidates = [c for c in self._finder(state, timeline).candidates() if (timeline.peak, c.move) not in tabu]
        groups: dict[tuple[int, ...], list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            groups[candidate.kind].append(candidate)
        scored = []
        for members in groups.values():
            members.sort(key=lambda c: c.order)
            best = max(c.bytes / (c.seconds + 1e-9) for c in members)
            scored.append((best, sum(c.bytes for c in members), members[:BATCH]))
        scored.sort(key=lambda item: (-item[0], -item[1], item[2][0].order))
        return [members for _, _, members in scored]


def _variants(batch: list[Candidate]) -> list[list[Move]]:
    """What to try of a batch, in order: all of it, every second member, one; and the same without holding what is
    computed on the way."""
    parts = [batch]
    if len(batch) > 2:
        parts.append(batch[1::2])
    if len(batch) > 1:
        parts.append(batch[:1])
    found = [[c.move for c in part] for part in parts]
    lean = [[c.lean for c in part] for part in parts]
    return found + [moves for moves, plain in zip(lean, found, strict=True) if moves != plain]
