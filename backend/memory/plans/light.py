"""Plans of a graph that hold little between its halves, where nobody knows yet what else is there then."""

from __future__ import annotations

from optpass.backend.memory.plans.allot import choices_of
from optpass.backend.memory.plans.bounds import Choice
from optpass.passes.memory.search.schedule import State, Timeline
from optpass.passes.memory.search.search import Search


def lightest(search: Search, room: int, *, brief: bool = False) -> Timeline | None:
    """Of the plans that fit `room` as the search counts them, the one that holds least; None where none does. `brief`:
    it is not to last, so that those on the search's way down do, where one of them fits."""
    chosen: Choice | None = None
    for few in (True, False) if brief else (False,):
        found = choices_of(search, search.problem.tail, brief=few) if chosen is None else []
        fitting = [one for one in found if max(one.peak, one.forward) <= room]
        chosen = min(fitting, key=lambda choice: (choice.held, choice.peak, choice.seconds), default=chosen)
    return None if chosen is None or chosen.state is None else search.schedule.run(State.thawed(chosen.state))


def light(search: Search, runs: int = 1, room: int = 0) -> Timeline:
    """The plan of the smallest sum of its peak and what it holds, so many times: what it needs beside `runs` more runs
    of itself; or the fastest of which that fits `room`, with what comes between the halves of each."""
    tail = search.problem.tail
    choices = choices_of(search, tail)
    between = tail + sum(s.bytes for s in search.problem.storages if s.tangent)

    def needed(choice: Choice) -> int:
        return max(choice.peak, choice.forward, choice.held + between) + runs * choice.held

    fitting = [choice for choice in choices if needed(choice) + runs * tail <= room]
    fastest = min(fitting, key=lambda choice: (choice.seconds, needed(choice)), default=None)
    chosen = fastest or min(choices, key=lambda choice: (needed(choice), choice.seconds))
    assert chosen.state is not None  # choices of a search have one
    return search.schedule.run(State.thawed(chosen.state))
