"""What was found for a problem serves an equal one, and no other."""

from __future__ import annotations

import pytest

from optpass.passes.memory.search import schedule
from optpass.passes.memory.search.known import Known, graph_key_of, key_of
from optpass.passes.memory.search.search import Remembered, Search


def test_an_equal_problem_is_not_searched_again(joints, programs, monkeypatch):
    known = Remembered()
    first = Search(programs.problem_of(joints["stack"][2]), known=known)
    budgets = [first.floor, (first.floor + first.unconstrained) // 2, first.unconstrained]
    wanted = [first.at_most(budget) for budget in budgets]
    alone = Search(programs.problem_of(joints["stack"][2]))
    monkeypatch.setattr(Search, "_find", lambda self, start: pytest.fail("searched"))
    again = Search(programs.problem_of(joints["stack"][2]), known=known)
    assert again.way is first.way and again.refilled() is first.refilled()
    for budget, (state, timeline) in zip(budgets, wanted, strict=True):
        for other in (again, alone):
            found = other.at_most(budget)
            assert found is not None
            assert found[0].frozen() == state.frozen() and found[1].peak == timeline.peak
    assert again.frontier() == first.frontier() == alone.frontier()


def test_with_more_between_its_halves_what_was_tried_is_known_and_plans_are_the_same(joints, programs):
    known = Remembered()

    def searched(change, known):
        problem = programs.problem_of(joints["stack"][2])
        change(problem)
        search = Search(problem, known=known)
        ran, run = [], search.schedule.run
        search.schedule.run = lambda state: ran.append(state) or run(state)
        return search.frontier(), [plan.state.frozen() for plan in search.refilled()], len(ran)

    def change(**figures):
        return lambda problem: [setattr(problem, name, value) for name, value in figures.items()]

    searched(change(), known)
    for figures in ({"tail": 4096}, {"early": 512}, {"kept": 300}, {"outputs_held": False}, {"saved_held": True}):
        *alone, all_of_them = searched(change(**figures), None)
        *found, some = searched(change(**figures), known)
        assert found == alone
        assert some < all_of_them or not figures.keys() & {"tail", "early", "kept"}
    assert searched(change(tail=4096), known)[2] < 0.2 * all_of_them


def test_no_more_than_so_many_are_remembered(joints, programs, monkeypatch):
    monkeypatch.setattr(schedule, "MOST_TRIED", 10)
    known = Remembered()
    problem = programs.problem_of(joints["stack"][2])
    assert Search(problem, known=known).frontier() == Search(problem).frontier()
    assert len(known.tried_of(graph_key_of(problem))) == 10


def test_whatever_a_search_reads_makes_another_problem(joints, programs):
    def key(change):
        problem = programs.problem_of(joints["chain"][2])
        change(problem)
        return key_of(problem)

    same = key(lambda p: None)
    assert same == key(lambda p: p.notes.append("a note"))

    def operation(name, value):
        return lambda p: setattr(p.operations[0], name, value)

    changes = [
        lambda p: setattr(p, "tail", p.tail + 1), lambda p: setattr(p, "kept", 1),
        lambda p: setattr(p, "outputs_held", not p.outputs_held), lambda p: setattr(p, "baseline", frozenset()),
        lambda p: setattr(p.storages[-1], "bytes", 1), lambda p: setattr(p, "tangents_held", not p.tangents_held),
        operation("seconds", 1.0), operation("workspace", 7), operation("kept_why", "random"),
        operation("inputs", ()),
    ]  # fmt: skip
    keys = [key(change) for change in changes]
    assert len({same, *keys}) == len(keys) + 1


def test_the_last_ones_are_remembered():
    known: Known[int] = Known(most=2)
    known.put("a", 1)
    known.put("b", 2)
    assert known.get("a") == 1
    known.put("c", 3)
    assert known.get("b") is None and known.get("a") == 1 and known.get("c") == 3
