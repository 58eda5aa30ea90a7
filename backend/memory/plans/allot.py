"""Several compiled graphs in one step, or one that runs several times: which plan of each makes the step fit.

Each graph has plans that differ in three figures: the peak while it runs itself, what it holds while others run, and
the time of what it computes again. Every situation that was seen in a step bounds a sum of them (`bounds`). The plans
begin with what holds least, and are exchanged for faster ones, the best seconds for the bytes first, as long as all
bounds hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from optpass.backend.memory.plans.bounds import Bound, Choice, Ints, excess, plan_excess
from optpass.backend.memory.plans.searches import CHOICES, SEARCHES
from optpass.passes.memory.problem import Problem
from optpass.passes.memory.search.known import key_of
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search

T = TypeVar("T")

#: What is added between forward and backward, in parts of the peak, to find plans that hold less and less; and the same
#: for graphs of more than so many operations, whose search takes seconds.
PRESSURES, PRESSURES_LARGE, LARGE = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 1.0), 1000
#: Part of the usual effort for each of those beside the first.
UNDER_PRESSURE = 0.25
#: Plans of one graph that are compared, and for its floor alone; of more, those that lie evenly.
MOST_PLANS, LEAST_PLANS = 120, 16
#: Of two graphs with so many pairs of plans, times the bounds, both plans are not exchanged at once; nor for less than
#: this part of the seconds.
MOST_PAIRS, LEAST_SAVED = 500_000, 1e-3


@dataclass(frozen=True)
class Around:
    """What is known of the step around a graph.

    Attributes:
        released: bytes of outputs that are gone when the loss runs backward.
        given: storages of what callers gave it, parameters aside, and their bytes.
    """

    released: int = 0
    given: Mapping[int, int] = field(default_factory=dict)


NOTHING_AROUND = Around()


def choices_of(
    known: Search,
    tail: int,
    around: Around = NOTHING_AROUND,
    *,
    waits: bool = True,
    brief: bool = False,
    effort: float = 1.0,
) -> list[Choice]:
    """Plans that no other is better than in all figures; those of equal graphs are looked for once.

    Args:
        known: a search of the graph; the tail of its problem is changed for others, and set to `tail` in the end.
        tail: as in `Problem`.
        waits: other graphs run between its forward and its backward, so that it matters what it holds then.
        brief: few plans, those on the search's way down.
        effort: part of the usual effort for those up from it.
    """
    known.problem.tail = tail
    of = (key_of(known.problem), around.released, sorted(around.given.items()), waits, brief, effort)
    choices = CHOICES.get(repr(of))
    if choices is None:
        choices = _choices_of(known, tail, around, waits, brief, effort)
        CHOICES.put(repr(of), choices)
    return choices


def _choices_of(known: Search, tail: int, around: Around, waits: bool, brief: bool, effort: float) -> list[Choice]:
    problem, most = known.problem, LEAST_PLANS if brief else MOST_PLANS
    pressures = PRESSURES if len(problem.operations) <= LARGE else PRESSURES_LARGE
    found: dict[tuple[int, ...], Choice] = {}
    peak = 0
    for pressure in pressures if waits else pressures[:1]:
        part = UNDER_PRESSURE if pressure else 1.0
        problem.tail = tail + int(pressure * peak)
        search = known if known.holds else Search(problem, known=SEARCHES)
        peak = peak or search.unconstrained
        schedule = search.schedule
        points = _evenly(search.way.points, most) if brief else search.way.points
        states = [search.state_at(point.moves) for point in points]
        states += [] if brief else [plan.state for plan in search.refilled(part * effort)]
        outputs = {s: problem.storages[s].bytes for s in problem.forward_outputs}
        base = schedule.run(search.start).recomputed_s
        for state in _evenly(states, most):
            choice = _choice(problem, schedule.run(state), outputs, around, base)
            key = choice.peak, choice.forward, choice.held, choice.reads + choice.returns
            if key not in found or choice.seconds < found[key].seconds:
                found[key] = replace(choice, state=state.frozen())
    problem.tail = tail
    return _best(list(found.values()))


def _choice(
    problem: Problem, timeline: Timeline, outputs: Mapping[int, int], around: Around, base: float
) -> Choice:  # fmt: skip
    kept = sum(problem.storages[s].bytes for s in timeline.saved if s not in outputs)
    returns = sum(outputs[s] for s in timeline.saved if s in outputs)
    held, peak = kept + sum(outputs.values()), int(timeline.backward.max(initial=0))
    forward = int(timeline.forward.max(initial=0))
    read = {s for i in timeline.steps for s in problem.operations[i].inputs} if around.given else set()
    reads = sum(size for s, size in around.given.items() if s in read)
    later = held - max(0, around.released - returns)
    return Choice(peak, held, max(0.0, timeline.recomputed_s - base), held, later, forward, reads, returns)


def _evenly(items: Sequence[T], most: int) -> list[T]:
    """At most so many, the first and the last one among them."""
    if len(items) <= most:
        return list(items)
    return [items[(len(items) - 1) * i // (most - 1)] for i in range(most)]


def _best(choices: list[Choice]) -> list[Choice]:
    """Those that no other is at most as large and as slow as."""
    kept: list[tuple[Choice, tuple[int, ...]]] = []
    for choice in sorted(choices, key=lambda c: (c.seconds, c.held, c.peak)):
        sizes = choice.peak, choice.forward, choice.held, choice.reads + choice.returns
        if not any(all(k <= size for k, size in zip(known, sizes, strict=True)) for _, known in kept):
            kept.append((choice, sizes))
    return [choice for choice, _ in kept]


def select(choices: Sequence[Sequence[Choice]], runs: Sequence[int], bounds: Sequence[Bound]) -> list[Choice]:
    """A plan for each graph, so that all bounds hold; where nothing does that, what breaks them least.

    Found from what holds least upwards, and from what is fastest downwards: what loses less time is taken.

    Args:
        choices: plans of each graph.
        runs: how often each runs in a step.
        bounds: of the step.
    """
    sums = _Sums(choices, runs, bounds)
    low = [min(range(len(plans)), key=lambda i: (plans[i].held, plans[i].peak)) for plans in choices]
    high = [min(range(len(plans)), key=lambda i: plans[i].seconds) for plans in choices]
    sums.lower(low, dear=True)
    sums.lower(high, dear=False)
    found = []
    for chosen in (low, high):
        sums.raise_(chosen)
        while sums.exchange_two(chosen):
            sums.raise_(chosen)
        found.append((max(0, sums.excess(chosen)), sums.lost(chosen), chosen))
    best = min(found, key=lambda one: one[:2])[2]
    return [plans[i] for plans, i in zip(choices, best, strict=True)]


def least(choices: Sequence[Sequence[Choice]], runs: Sequence[int], bounds: Sequence[Bound]) -> list[Choice]:
    """A plan for each graph, so that the largest of the sums is as small as was found."""
    return select(choices, runs, [replace(bound, limit=0) for bound in bounds])


def above(
    chosen: Sequence[Choice], choices: Sequence[Sequence[Choice]], runs: Sequence[int], bounds: Sequence[Bound]
) -> int | None:
    """The bytes that the bounds are short of for the smallest exchange of one plan for a faster one; None where there
    is none."""
    sums = _Sums(choices, runs, bounds)
    short = []
    for graph, plan in enumerate(chosen):
        over = sums.exchanged(plan_excess(chosen, bounds), graph, plan)
        faster = over[(sums.seconds[graph] < plan.seconds) & (over > 0)]
        short += [int(faster.min())] if len(faster) else []
    return min(short, default=None)


class _Sums:
    """What plans come to in each of the bounds; a plan is its place among those of its graph.

    Attributes:
        held, seconds: of the plans of each graph.
        parts: of the same, what they add to each of the bounds: [bounds, plans].
    """

    def __init__(self, choices: Sequence[Sequence[Choice]], runs: Sequence[int], bounds: Sequence[Bound]) -> None:
        self.choices, self.runs, self.bounds = choices, runs, bounds
        self.held = [np.array([c.held for c in plans], dtype=np.int64) for plans in choices]
        self.seconds = [np.array([c.seconds for c in plans]) for plans in choices]
        self.own = [np.array([bound.graph == graph for bound in bounds], dtype=bool) for graph in range(len(choices))]
        self.parts = [self._parts(graph, plans) for graph, plans in enumerate(choices)]

    def _parts(self, graph: int, plans: Sequence[Choice]) -> Ints:
        parts = np.zeros((len(self.bounds), len(plans)), dtype=np.int64)
        for i, bound in enumerate(self.bounds):
            if bound.graph == graph:
                parts[i] += [bound.needed(plan) for plan in plans]
            for other, times in bound.others:
                if other == graph:
                    parts[i] += [bound.waiting(graph, times, plan) for plan in plans]
        return parts

    def exchanged(self, over: Ints, graph: int, plan: Choice) -> Ints:
        """For each plan of `graph`, what the worst bound is broken by where it takes the place of `plan`, with which
        the bounds are broken by `over`."""
        if not len(over):
            return np.zeros(len(self.held[graph]), dtype=np.int64)
        worst: Ints = (over[:, None] + self._change(graph, plan)).max(axis=0)
        return worst

    def chosen(self, places: Sequence[int]) -> list[Choice]:
        """The plans at `places`."""
        return [plans[i] for plans, i in zip(self.choices, places, strict=True)]

    def excess(self, places: Sequence[int]) -> int:
        """As `excess`, of places."""
        return excess(self.chosen(places), self.bounds)

    def lost(self, places: Sequence[int]) -> float:
        """Seconds of recomputation in a step."""
        return sum(float(self.seconds[g][i]) * self.runs[g] for g, i in enumerate(places))

    def lower(self, places: list[int], *, dear: bool) -> None:
        """Exchange single plans as long as that lowers what the worst bound is broken by: what lowers it most, or, if
        not `dear`, most for the time that it costs. In place."""
        while (now := self.excess(places)) > 0:
            over = plan_excess(self.chosen(places), self.bounds)
            best: tuple[float, int, int] | None = None
            for graph, i in enumerate(places):
                gain = (now - self.exchanged(over, graph, self.choices[graph][i])).astype(np.float64)
                cost = np.maximum(self.seconds[graph] - self.seconds[graph][i], 0.0) * self.runs[graph]
                score = gain if dear else np.where(gain > 0, gain / (cost + 1e-9), gain)
                at = int(score.argmax())
                if gain[at] > 0 and (best is None or score[at] > best[0]):
                    best = float(score[at]), graph, at
            if best is None:
                return
            places[best[1]] = best[2]

    def raise_(self, places: list[int]) -> None:
        """Exchange single plans for faster ones, the best seconds for the bytes first, as long as the bounds hold. In
        place."""
        while True:
            over, now = plan_excess(self.chosen(places), self.bounds), self.excess(places)
            best: tuple[float, int, int] | None = None
            for graph, i in enumerate(places):
                plan, times = self.choices[graph][i], self.runs[graph]
                saved = (plan.seconds - self.seconds[graph]) * times
                rise = self._change(graph, plan)[self.own[graph]].max(axis=0, initial=0)
                more = np.maximum(self.held[graph] - plan.held, 0) * times + rise
                fits = (saved > 0) & (self.exchanged(over, graph, plan) <= max(0, now))
                score = np.where(fits, saved / (more + 1), 0.0)
                at = int(score.argmax())
                if fits[at] and (best is None or score[at] > best[0]):
                    best = float(score[at]), graph, at
            if best is None:
                return
            places[best[1]] = best[2]

    def exchange_two(self, places: list[int]) -> bool:
        """Exchange the plans of two graphs where that saves most time and the bounds hold; whether any did."""
        chosen = self.chosen(places)
        over, now = plan_excess(chosen, self.bounds), max(0, self.excess(places))
        best: tuple[float, list[int]] = LEAST_SAVED * (self.lost(places) + 1e-12), []
        for one, other in combinations(range(len(places)), 2):
            if len(over) * len(self.held[one]) * len(self.held[other]) > MOST_PAIRS:
                continue
            saved = [(chosen[g].seconds - self.seconds[g]) * self.runs[g] for g in (one, other)]
            both = np.add.outer(*saved)
            changes = self._change(one, chosen[one])[:, :, None] + self._change(other, chosen[other])[:, None, :]
            after = over[:, None, None] + changes
            both[after.max(axis=0, initial=-(2**62)) > now] = 0.0
            first, second = np.unravel_index(int(both.argmax()), both.shape)
            if both[first, second] > best[0]:
                best = float(both[first, second]), [*places]
                best[1][one], best[1][other] = int(first), int(second)
        places[:] = best[1] or places
        return bool(best[1])

    def _change(self, graph: int, plan: Choice) -> Ints:
        """By how much more each bound is broken with each plan of `graph` in the place of `plan`."""
        change: Ints = self.parts[graph] - self._parts(graph, [plan])
        return change
