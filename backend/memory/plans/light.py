"""Plans of a graph that hold little between its halves, where nobody knows yet what else is there then."""

from __future__ import annotations

from optpass.backend.memory.plans.allot import choices_of
from optpass.backend.memory.plans.bounds import Choice
from optpass.passes.memory.search.schedule import State, Timeline
from optpass.passes.memory.search.search import Search


def lightest(search: Search, room: int) -> Timeline | None:
    """Of the plans that fit `room` as the search counts them, the one that holds least; None where none does."""
    fitting = [one for one in choices_of(search, search.problem.tail) if max(one.peak, one.forward) <= room]
    chosen = min(fitting, key=lambda choice: (choice.held, choice.peak, choice.seconds), default=None)
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
