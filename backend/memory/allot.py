"""Several compiled graphs in one step, or one that runs several times: which plan of each makes the step fit.

Each graph has plans that differ in three figures: the peak while it runs itself, what it holds while others run, and
the time of what it computes again. Every situation that was seen in a step bounds a sum of them. The plans begin with
what holds least, and are exchanged for faster ones, the best seconds for the bytes first, as long as all bounds hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from optpass.backend.memory.searches import SEARCHES
from optpass.passes.memory.problem import Problem
from optpass.passes.memory.schedule import FrozenState, State, Timeline
from optpass.passes.memory.search import Search

#: What is added between forward and backward, in parts of the peak, to find plans that hold less and less; and the same
#: for graphs of more than so many operations, whose search takes seconds.
PRESSURES, PRESSURES_LARGE, LARGE = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 1.0), 1000
#: Plans of one graph that are compared; of more, those that lie evenly.
MOST_PLANS = 120


@dataclass(frozen=True)
class Choice:
    """One plan of one graph: bytes above what is held beside it, and seconds; the state that it is, where known."""

    peak: int
    held: int
    seconds: float
    state: FrozenState | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Bound:
    """`fixed` + what the `others` hold + the peak of `graph` must be at most `limit`.

    Attributes:
        graph: index.
        others: (index, number of runs).
        since_loss: part of `fixed` that is there from the loss on; negative where something has gone by then.
    """

    graph: int
    others: tuple[tuple[int, int], ...]
    fixed: int
    limit: int
    since_loss: int = 0


def choices_of(known: Search, tail: int, less: int = 0, waits: bool = True, before: int = 0) -> list[Choice]:
    """Plans that no other is better than in all three figures.

    Args:
        known: a search of the graph; the tail of its problem is changed for others, and set to `tail` in the end.
        tail: as in `Problem`.
        less: bytes that the peak is less by in what the inner compiler generates.
        before: bytes that are there before the loss and not behind it.
        waits: other graphs run between its forward and its backward, so that it matters what it holds then.
    """
    problem = known.problem
    pressures = PRESSURES if len(problem.operations) <= LARGE else PRESSURES_LARGE
    found: dict[tuple[int, int], Choice] = {}
    peak = 0
    for pressure in pressures if waits else pressures[:1]:
        problem.tail = tail + int(pressure * peak)
        search = known if known.holds else Search(problem, known=SEARCHES)
        peak = peak or search.unconstrained
        schedule = search.schedule
        states = [search.state_at(point.moves) for point in search.way.points]
        states += [plan.state for plan in search.refilled()]
        outputs = {s: problem.storages[s].bytes for s in problem.forward_outputs}
        base = schedule.run(search.start).recomputed_s
        for state in _evenly(states):
            choice = _choice(problem, schedule.run(state), outputs, tail - problem.tail, less, base, before)
            key = choice.peak, choice.held
            if key not in found or choice.seconds < found[key].seconds:
                found[key] = replace(choice, state=state.frozen())
    problem.tail = tail
    return _best(list(found.values()))


def _choice(
    problem: Problem,
    timeline: Timeline,
    outputs: Mapping[int, int],
    added: int,
    less: int,
    base: float,
    before: int,
) -> Choice:
    kept = sum(problem.storages[s].bytes for s in timeline.saved if s not in outputs)
    inside = max(int(timeline.forward.max(initial=0)) + before, int(timeline.backward.max(initial=0)))
    peak = max(inside - less, timeline.boundary + added)
    return Choice(peak, kept + sum(outputs.values()), max(0.0, timeline.recomputed_s - base))


def _evenly(items: list[State]) -> list[State]:
    if len(items) <= MOST_PLANS:
        return items
    return [items[len(items) * i // MOST_PLANS] for i in range(MOST_PLANS)]


def _best(choices: list[Choice]) -> list[Choice]:
    """Those that no other is at most as large and as slow as."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.seconds, c.held, c.peak)):
        if not any(k.peak <= choice.peak and k.held <= choice.held for k in kept):
            kept.append(choice)
    return kept


def select(choices: Sequence[Sequence[Choice]], runs: Sequence[int], bounds: Sequence[Bound]) -> list[Choice]:
    """A plan for each graph, so that all bounds hold; where nothing does that, what breaks them least.

    Args:
        choices: plans of each graph.
        runs: how often each runs in a step.
        bounds: of the step.
    """
    chosen = [min(plans, key=lambda c: (c.held, c.peak)) for plans in choices]
    _shrink(chosen, choices, bounds)
    while True:
        best: tuple[float, int, Choice] | None = None
        now = excess(chosen, bounds)
        for graph, plans in enumerate(choices):
            for plan in plans:
                saved = (chosen[graph].seconds - plan.seconds) * runs[graph]
                if saved <= 0:
                    continue
                trial = [*chosen[:graph], plan, *chosen[graph + 1 :]]
                after = excess(trial, bounds)
                if after > max(0, now):
                    continue
                more = max(0, plan.held - chosen[graph].held) * runs[graph] + max(0, plan.peak - chosen[graph].peak)
                score = saved / (more + 1)
                if best is None or score > best[0]:
                    best = score, graph, plan
        if best is None:
            return chosen
        chosen[best[1]] = best[2]


def _shrink(chosen: list[Choice], choices: Sequence[Sequence[Choice]], bounds: Sequence[Bound]) -> None:
    """Exchange single plans as long as that lowers what the worst bound is broken by. In place."""
    now = excess(chosen, bounds)
    while now > 0:
        best: tuple[int, int, Choice] | None = None
        for graph, plans in enumerate(choices):
            for plan in plans:
                after = excess([*chosen[:graph], plan, *chosen[graph + 1 :]], bounds)
                if after < now and (best is None or after < best[0]):
                    best = after, graph, plan
        if best is None:
            return
        now, chosen[best[1]] = best[0], best[2]


def excess(chosen: Sequence[Choice], bounds: Sequence[Bound]) -> int:
    """Bytes that the worst bound is broken by; negative where there is room in all."""
    return max((total(chosen, bound) - bound.limit for bound in bounds), default=0)


def total(chosen: Sequence[Choice], bound: Bound) -> int:
    """The sum that a bound limits."""
    return bound.fixed + sum(chosen[g].held * n for g, n in bound.others) + chosen[bound.graph].peak
