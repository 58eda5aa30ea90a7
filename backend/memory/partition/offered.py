"""Plans that do not follow from this graph alone: the step's as a whole, and what is left beside calls to come."""

from __future__ import annotations

from collections.abc import Callable

from optpass.backend.compat.memory_calls import LOOP
from optpass.backend.memory.budget import Budget
from optpass.backend.memory.partition.choose import Trial
from optpass.backend.memory.plans.light import light, lightest
from optpass.backend.memory.plans.searches import least_held
from optpass.passes.memory.search.schedule import State, Timeline
from optpass.passes.memory.search.search import Search

CarryOut = Callable[[Timeline], Trial]

#: Plans that hold little and may not fit are carried out so many times before the smallest ones are.
TRIES = 3


def needed_beside_more(budget: Budget, search: Search, carry_out: CarryOut) -> int:
    """The least that the graph needs beside the runs of itself that its caller's code says are to come; of a loop
    nobody knows how many."""
    more = budget.to_come
    if not 0 < more < LOOP:
        return 0
    trial = carry_out(light(search, more))
    return trial.peak + more * trial.replay.handed_bytes


def offered_plan(
    budget: Budget, search: Search, carry_out: CarryOut, room: int, *, brief: bool = False
) -> Trial | None:
    """The plan that was chosen for the step as a whole, if this is the graph that it was chosen for and it fits;
    where nobody knows yet what follows, the one that holds least, or needs least beside more calls of it. `brief`:
    it is not to last."""
    if budget.shared:
        more = budget.to_come
        named = room if more < LOOP and budget.apart is None else 0  # else nobody knows how much more comes
        trial = carry_out(light(search, more, named)) if more else _holding_least(search, carry_out, room, brief)
        if trial.peak > room and budget.lenient and not more:
            trial = carry_out(light(search))
        return trial if trial.peak <= room or budget.lenient else None
    if budget.state is None or budget.state[0] != len(search.problem.operations):
        return None
    trial = carry_out(search.schedule.run(State.thawed(budget.state[1])))
    return trial if trial.peak <= room else None


def _holding_least(search: Search, carry_out: CarryOut, room: int, brief: bool) -> Trial:
    """The plan that holds least, or, where that needs more than `room` itself, the one that does of those that fit."""
    trial, aim = carry_out(least_held(search, brief=brief)), room
    for _ in range(TRIES - 1):
        timeline = lightest(search, aim, brief=brief) if trial.peak > room else None
        if timeline is None:
            break
        trial = carry_out(timeline)
        aim -= max(1, trial.peak - room)
    return trial
