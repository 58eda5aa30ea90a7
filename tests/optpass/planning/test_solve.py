"""Plans of captured steps: the ledger adds up, budgets are held, and the curve never inverts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from optpass.planning.plan import Solved


@pytest.fixture(params=["one graph", "two graphs"])
def step(request: pytest.FixtureRequest, solved: Solved, solved_in_two: Solved) -> Solved:
    return solved if request.param == "one graph" else solved_in_two


def test_the_ledger_adds_up_at_every_budget(step: Solved) -> None:
    planner = step.planner
    assert planner.floor < planner.unconstrained
    for part in range(11):
        budget = planner.floor + (planner.unconstrained - planner.floor) * part // 10
        plan = planner.plan(budget)
        assert plan is not None and plan.predicted_peak_bytes <= budget
        assert plan.ledger.total == plan.predicted_peak_bytes
        assert plan.ledger.optimizer == step.state.optimizer.state_bytes


def test_less_memory_is_never_faster(step: Solved) -> None:
    planner = step.planner
    span = planner.unconstrained - planner.floor
    plans = [planner.plan(planner.unconstrained - span * part // 20) for part in range(21)]
    assert all(plan is not None for plan in plans)
    peaks = [plan.predicted_peak_bytes for plan in plans if plan is not None]
    times = [plan.slowdown for plan in plans if plan is not None]
    assert peaks == sorted(peaks, reverse=True) and times == sorted(times)


def test_the_curve(step: Solved) -> None:
    curve = step.planner.curve()
    assert curve[0].peak_bytes == step.planner.unconstrained and curve[0].slowdown == 1.0
    assert curve[-1].peak_bytes == step.planner.floor
    assert all(a.peak_bytes > b.peak_bytes and a.slowdown <= b.slowdown for a, b in itertools.pairwise(curve))


def test_nothing_is_recomputed_without_need(step: Solved) -> None:
    plan = step.planner.plan(None)
    assert plan is not None and plan.budget_bytes is None
    assert plan.predicted_peak_bytes == step.planner.unconstrained
    assert not plan.recomputed and plan.recompute_seconds == 0 and plan.slowdown == 1.0


def test_below_the_floor_there_is_no_plan(step: Solved) -> None:
    assert step.planner.plan(step.planner.floor - 1) is None
    assert step.planner.plan(step.planner.floor) is not None
    assert step.planner.recompute_seconds(step.planner.floor - 1) == float("inf")


def test_what_is_recomputed_adds_up(solved: Solved) -> None:
    planner = solved.planner
    plan = planner.plan((planner.floor + planner.unconstrained) // 2)
    unconstrained = planner.plan(None)
    assert plan is not None and unconstrained is not None and plan.recomputed
    total = sum(item.seconds * item.copies for item in plan.recomputed)
    assert total == pytest.approx(plan.recompute_seconds)
    kept = {tensor.node for tensor in plan.saved}
    before = {tensor.node for tensor in unconstrained.saved}
    assert before - kept <= {item.node for item in plan.recomputed} | kept
    assert any(item.file and item.file.endswith("conftest.py") and item.line for item in plan.recomputed)


def test_the_optimizer_step_can_be_the_peak(solved: Solved) -> None:
    """With so much state, no plan of forward and backward matters."""
    from dataclasses import replace

    from optpass.planning.solve import StepPlanner

    fixed = solved.planner.fixed
    heavy = replace(fixed, at_optimizer=replace(fixed.at_optimizer, temporaries=10**9))
    planner = StepPlanner(solved.planner.graphs, heavy)
    plan = planner.plan(None)
    assert plan is not None and planner.floor == planner.unconstrained == plan.predicted_peak_bytes
    assert plan.ledger.temporaries == 10**9 and plan.ledger.total == plan.predicted_peak_bytes
    assert plan.ledger.gradients == solved.state.gradients and planner.largest_at_floor() == []


def test_a_step_needs_a_graph(solved: Solved) -> None:
    from optpass.planning.solve import StepPlanner

    build: Callable[[], object] = lambda: StepPlanner([], solved.planner.fixed)  # noqa: E731
    with pytest.raises(ValueError, match="nothing to plan"):
        build()
