"""One plan for all graphs of a step that are equal, where that costs next to nothing: it is compiled once."""

from __future__ import annotations

from collections.abc import Sequence

from optpass.backend.memory.plans.bounds import Bound, Choice, excess

#: Part of a step's seconds that it may take longer by for that.
MORE = 0.002


def made_alike(
    chosen: Sequence[Choice], choices: Sequence[Sequence[Choice]], equal: Sequence[Sequence[int]],
    runs: Sequence[int], bounds: Sequence[Bound], seconds: float,
) -> list[Choice]:  # fmt: skip
    """`chosen`, with the same plan for the graphs of each group, where the bounds hold with it as well.

    Args:
        chosen: a plan for each graph.
        choices: plans of each, `chosen` among them.
        equal: groups of indices of equal graphs.
        runs: how often each runs in a step.
        bounds: of the step.
        seconds: that the step takes where nothing is computed again.
    """
    found, lost = list(chosen), _lost(chosen, runs)
    most, over = lost + MORE * seconds, max(0, excess(chosen, bounds))
    for group in equal:
        places = [{plan.state: plan for plan in choices[i] if plan.state is not None} for i in group]
        best: tuple[float, list[Choice]] | None = None
        for state in places[0] if len({found[i].state for i in group}) > 1 else ():
            if not all(state in plans for plans in places):
                continue
            trial = list(found)
            for i, plans in zip(group, places, strict=True):
                trial[i] = plans[state]
            now = _lost(trial, runs)
            if now <= most and (best is None or now < best[0]) and excess(trial, bounds) <= over:
                best = now, trial
        found = found if best is None else best[1]
    return found


def _lost(chosen: Sequence[Choice], runs: Sequence[int]) -> float:
    return sum(plan.seconds * times for plan, times in zip(chosen, runs, strict=True))
