"""What was found in this process for graphs that were planned (see `passes.memory.known`), and plans that a search of
the same graph finds with more or less between its halves."""

from __future__ import annotations

from collections.abc import Iterator

from optpass.backend.memory.plans.bounds import Choice
from optpass.passes.memory.search.known import Known
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Remembered, Search

SEARCHES = Remembered()
#: Plans to choose from, by all that they depend on (`allot.choices_of`): repeated layers make repeated graphs.
CHOICES: Known[list[Choice]] = Known(64)
#: Where what is between the halves of a graph is its floor, plans are also looked for with less there, in parts of it.
LESS_BETWEEN = (0.1, 0.2)


def beneath(search: Search) -> Iterator[Timeline]:
    """The plans of the smallest peaks, were there less between the halves of the graph."""
    problem, tail = search.problem, search.problem.tail
    for part in LESS_BETWEEN:
        problem.tail = tail - int(part * search.floor)
        inside = Search(problem, known=SEARCHES)
        found = inside.at_most(inside.floor)
        problem.tail = tail
        if found is not None:
            yield search.schedule.run(found[0])


def least_held(search: Search, *, brief: bool = False) -> Timeline:
    """The plan that holds least between forward and backward; `brief`: it is not to last, and is not made faster."""
    problem, tail = search.problem, search.problem.tail
    problem.tail = tail + search.unconstrained
    lean = Search(problem, known=SEARCHES)
    found = lean.on_the_way(lean.floor) if brief else lean.at_most(lean.floor)
    assert found is not None  # the floor is one of its plans
    problem.tail = tail
    return search.schedule.run(found[0])
