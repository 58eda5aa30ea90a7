"""The way back up: from states that are small, what is best kept again, until nothing is computed twice for no reason.

The way down lets go of what frees most where the peak is; it never asks what could have been kept all along. Here each
step keeps the tensors, or holds them on, that save most time for each byte that the peak rises; what does not raise it
comes first. Whatever is tried is a plan too. Where two plans leave a wide gap of bytes between them, what one
keeps and the other does not is kept one by one. The states found do not depend on a budget: of all whose peak fits, the
fastest is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from optpass.passes.memory.search.schedule import Schedule, State, Timeline
from optpass.passes.memory.uncollected import uncollected

#: Operations that all timelines tried may have together: what bounds the time that this takes.
EFFORT = 300_000
#: Of graphs of more operations than this, so many timelines are tried all the same, and half as many for gaps: of a
#: loop of many steps fewer lead nowhere. A second for 2,000 operations.
LARGE, TIMELINES = 1_000, 600
#: Of graphs of at most so many operations, exchanges are tried too, whose number grows with the square.
SMALL, EFFORT_SMALL = 200, 600_000
#: Parts of the effort, each for the way up from one state: small ones and large ones are both looked at.
STARTS = 6
#: Classes of which one tensor less is tried, to come down to a gap from above.
LESS = 12
#: Kept tensors that may be let go of together for one that they are made of.
RUN = 3
#: Between plans whose peaks are further apart than this part of the larger, more are looked for, with this effort.
GAP, EFFORT_GAPS = 0.01, 300_000


@dataclass(frozen=True)
class Plan:
    """A state with its peak above the statics and its seconds of recomputation."""

    peak: int
    seconds: float
    state: State


class Refill:
    """Finds plans from given states upwards.

    Args:
        schedule: the step.
        classes: of storages; those of one class are kept together, or half of them, or one.
        pinned: storages that must stay kept.
        effort: part of the usual effort.
    """

    def __init__(
        self, schedule: Schedule, classes: Sequence[int], pinned: Collection[int] = (), effort: float = 1.0
    ) -> None:
        self.schedule, self.classes, self.pinned = schedule, classes, frozenset(pinned)
        #: By rising peak; seconds fall.
        self.plans: list[Plan] = []
        size = len(schedule.operations)
        self._small = size <= SMALL
        left = EFFORT_SMALL if self._small else EFFORT if size <= LARGE else TIMELINES * size
        gaps = EFFORT_GAPS if size <= LARGE else TIMELINES // 2 * size
        self._left, self._left_for_gaps = int(effort * left), int(effort * gaps)
        self._seen: set[tuple[int, float]] = set()

    @uncollected()
    def from_states(self, states: Iterable[State]) -> list[Plan]:
        """Plans above each of `states`, as far as the effort allows."""
        share = self._left // STARTS
        for state in states:
            if self._left > 0:
                self._up(state, max(self._left - share, 0))
        self._left = self._left_for_gaps
        self._fill()
        return self.plans

    def _run(self, state: State) -> Plan:
        """The plan of `state`, noted. The effort is that of running its timeline, also where that was tried before, so
        that the plans that are found do not depend on that."""
        figures = self.schedule.figures(state)
        self._left -= figures.steps
        plan = Plan(self.schedule.peak(figures), figures.seconds, state)
        self._note(plan)
        return plan

    def _note(self, plan: Plan) -> None:
        """Keep the plan if none that is as fast has so small a peak; drop those that it makes needless."""
        peak, seconds = plan.peak, plan.seconds
        at = bisect_right(self.plans, peak, key=lambda plan: plan.peak)
        if at and self.plans[at - 1].seconds <= seconds:
            return
        end = at
        while end < len(self.plans) and self.plans[end].seconds >= seconds:
            end += 1
        start = at - 1 if at and self.plans[at - 1].peak == peak else at
        self.plans[start:end] = [plan]

    def _up(self, state: State, left: int) -> None:
        """From `state` upwards until nothing helps, or until no more effort than `left` is left."""
        plan: Plan | None = self._run(state)
        while plan is not None and self._is_new(plan) and self._left > left:
            plan = self._best(plan)

    def _best(self, plan: Plan) -> Plan | None:
        """What saves most for each byte that the peak rises; an exchange only where it does not rise."""
        best: tuple[float, Plan] | None = None
        for trial, exchange in self._trials(plan.state, self.schedule.run(plan.state)):
            if self._left <= 0:
                break
            after = self._run(trial)
            saved = plan.seconds - after.seconds
            if saved <= 0 or (exchange and after.peak > plan.peak):
                continue
            score = saved / max(after.peak - plan.peak, 1)
            if best is None or score > best[0]:
                best = score, after
        return None if best is None else best[1]

    def _is_new(self, plan: Plan) -> bool:
        """Whether the way up has not been here before."""
        key = plan.peak, plan.seconds
        known = key in self._seen
        self._seen.add(key)
        return not known

    def _fill(self) -> None:
        """Look for plans in the gaps between those that were found, the widest first."""
        tried: set[tuple[int, int]] = set()
        while self._left > 0:
            pairs = ((low, high) for low, high in pairwise(self.plans) if (low.peak, high.peak) not in tried)
            wide = [(low, high) for low, high in pairs if high.peak - low.peak > GAP * high.peak]
            if not wide:
                return
            low, high = max(wide, key=lambda pair: pair[1].peak - pair[0].peak)
            tried.add((low.peak, high.peak))
            for state in self._between(low.state, high.state):
                if self._left <= 0:
                    return
                self._run(state)

    def _between(self, low: State, high: State) -> Iterator[State]:
        """From `low` towards `high`: first what costs most to compute again for its bytes; and the same from behind."""
        operations, sizes = self.schedule.operations, self.schedule.sizes
        more = sorted(
            (s for s in high.kept - low.kept if sizes[s]),
            key=lambda s: (-operations[self.schedule._producer[s]].seconds / sizes[s], s),
        )
        for way in (more, more[::-1]):
            state = low
            for s in way:
                state = _with(state, [s])
                yield state
        yield from self._less(high)

    def _less(self, high: State) -> Iterator[State]:
        """`high` without one tensor that it keeps, and without several: what costs least to compute again for its bytes
        first, one of each class."""
        operations, sizes, producer = self.schedule.operations, self.schedule.sizes, self.schedule._producer
        free = (s for s in sorted(high.kept) if sizes[s] and s not in self.pinned and s not in self.schedule._held)
        firsts = {self.classes[s]: s for s in free}
        cheap = sorted(firsts.values(), key=lambda s: (operations[producer[s]].seconds / sizes[s], s))[:LESS]
        without = high
        for s in cheap:
            state = high.copy()
            state.kept.discard(s)
            yield state
            without = without.copy()
            without.kept.discard(s)
            yield without

    def _trials(self, state: State, timeline: Timeline) -> Iterator[tuple[State, bool]]:
        """States that compute less again than `state` does, and exchanges of what is kept for what is not."""
        again: dict[int, list[int]] = defaultdict(list)
        for s in sorted({s for s, birth in zip(timeline.storage, timeline.birth, strict=True) if birth >= 0}):
            operation = self.schedule.operations[self.schedule._producer[s]]
            if not operation.backward and s in self.schedule._forward_made and self.schedule.sizes[s]:
                again[self.classes[s]].append(s)
        for members in again.values():
            for part in _parts(members):
                yield _with(state, part), False
        for trial in self._held_on(state, timeline):
            yield trial, False
        if not self._small:
            return
        kept: dict[int, list[int]] = defaultdict(list)
        for s in timeline.saved:
            if s not in self.pinned and s not in self.schedule._held:
                kept[self.classes[s]].append(s)
        for out in kept.values():
            for members in again.values():
                for gone, part in zip(_parts(out), _parts(members), strict=False):
                    trial = _with(state, part)
                    trial.kept.difference_update(gone)
                    yield trial, True
        for trial in self._instead(state, timeline, sorted(s for members in again.values() for s in members)):
            yield trial, True

    def _instead(self, state: State, timeline: Timeline, again: Sequence[int]) -> Iterator[State]:
        """States that keep one of `again` instead of those that are made of it next: these are kept no more, or only
        until they were read for the first time. What is kept for nobody is not kept for their sake either."""
        held = self.schedule._held
        free = sorted(s for s in timeline.saved if s not in self.pinned and s not in held)
        idle = state.kept.difference(timeline.saved, self.pinned, again)
        first = {s: timeline.anchors[timeline.uses[timeline.saved[s]][0]] + 1 for s in free}
        several = {s for s in free if timeline.anchors[timeline.uses[timeline.saved[s]][-1]] >= first[s]}
        for s in again:
            behind = [other for other in free if other > s]
            for count in range(1, min(len(behind), RUN) + 1):
                for until in ((), several.intersection(behind[:count])) if several else ((),):
                    trial = _with(state, [s])
                    trial.kept.difference_update(idle, set(behind[:count]).difference(until))
                    for other in until:
                        trial.evicted.setdefault(first[other], set()).add(other)
                    yield trial

    def _held_on(self, state: State, timeline: Timeline) -> Iterator[State]:
        """States where what was computed again once is held for its next use."""
        copies: dict[int, int] = defaultdict(int)
        for s, birth in zip(timeline.storage, timeline.birth, strict=True):
            copies[s] += birth >= 0
        for position in sorted(state.evicted):
            for s in sorted(state.evicted[position]):
                if copies.get(s, 0) > 1:
                    trial = state.copy()
                    trial.evicted[position].discard(s)
                    yield trial


def _with(state: State, part: Collection[int]) -> State:
    """`state` with `part` kept, and never let go of."""
    trial = state.copy()
    trial.kept.update(part)
    for gone in trial.evicted.values():
        gone.difference_update(part)
    return trial


def _parts(members: list[int]) -> Iterator[list[int]]:
    yield members
    if len(members) > 2:
        yield members[::2]
    if len(members) > 1:
        yield members[:1]
        yield members[-1:]


def fastest(plans: Iterable[Plan], peak: int) -> Plan | None:
    """The fastest plan whose peak is at most `peak`; of equals the smallest."""
    return min((p for p in plans if p.peak <= peak), key=lambda p: (p.seconds, p.peak), default=None)
