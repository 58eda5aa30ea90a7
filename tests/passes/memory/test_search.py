"""The way from 'nothing changed' to the floor: monotone, deterministic, within what is asked, and near enough."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from optpass.passes.memory.problem import Price
from optpass.passes.memory.search import refill
from optpass.passes.memory.search.schedule import Schedule, State
from optpass.passes.memory.search.search import Search


@pytest.fixture(scope="module")
def search(joints, programs):
    return Search(programs.problem_of(joints["stack"][2]))


def budgets(search, count):
    span = search.unconstrained - search.floor
    return [search.floor + span * i // (count - 1) for i in reversed(range(count))]


@pytest.mark.parametrize("count", [20, 60])
def test_budgets_never_invert(search, count):
    peaks, seconds = [], []
    for budget in budgets(search, count):
        found = search.at_most(budget)
        assert found is not None
        assert found[1].peak <= budget
        peaks.append(found[1].peak)
        seconds.append(found[1].recomputed_s)
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)


def test_the_frontier_is_what_budgets_get(search):
    frontier = search.frontier()
    assert frontier[0] == (search.unconstrained, 0.0)
    assert frontier[-1][0] == search.floor
    base = search.schedule.run(search.start).recomputed_s
    for (peak, seconds), (smaller, slower) in pairwise(frontier):
        assert peak > smaller and seconds <= slower
        assert search.at_most(peak)[1].recomputed_s - base <= seconds
    room = max((search.unconstrained - search.floor) // 8, 2 * max(s.bytes for s in search.problem.storages))
    for budget in budgets(search, 20):
        seconds = max(0.0, search.at_most(budget)[1].recomputed_s - base)
        assert min(slower for peak, slower in frontier if peak <= budget + room) <= seconds


def test_a_budget_is_used(search):
    """To 95%, or to within the largest tensor that could be kept instead: a small model has few to choose from."""
    largest = max(s.bytes for s in search.problem.storages)
    for budget in budgets(search, 20):
        peak = search.at_most(budget)[1].peak
        assert peak >= min(0.95 * budget, budget - largest)


def test_below_the_floor_there_is_no_plan(search):
    assert search.at_most(search.floor) is not None
    least = search.least  # of plans upwards from the way, too
    assert min(plan.peak for plan in search.refilled()) == least < search.floor
    assert search.at_most(least)[1].peak == least
    assert search.at_most(least - 1) is None


def test_the_unconstrained_plan_is_the_default_partitioners_or_better(joints, programs, search):
    schedule = Schedule(programs.problem_of(joints["stack"][2]))
    default = schedule.run(State(kept=set(schedule.problem.baseline)))
    found = search.at_most(search.unconstrained)
    assert found is not None
    assert search.way.points[0].peak == search.unconstrained == default.peak
    assert found[1].peak <= default.peak and found[1].recomputed_s <= default.recomputed_s


def test_the_same_graph_gives_the_same_plans(joints, programs, search):
    other = Search(programs.problem_of(joints["stack"][2]))
    assert other.way.moves == search.way.moves
    assert other.way.points == search.way.points


def test_layers_of_a_stack_are_of_one_class(joints, programs, search):
    problem = search.problem
    gelus = [s for s in problem.storages if "tanh" in str(s.node.target) or "erf" in str(s.node.target)]
    assert gelus
    inner = [s for s in gelus if s.node.op == "call_function"]
    assert len({search.classes[s.index] for s in inner[1:-1]}) <= max(1, len(inner) // 2)


@pytest.mark.slow
def test_the_floor_is_below_checkpointing_every_block(programs):
    """Every block's input kept, everything else computed again once: what people write by hand."""
    torch.manual_seed(0)
    model = programs.Stack(8, width=32, heads=4)
    problem = programs.problem_of(programs.joint_of(model, torch.randn(2, 32, 32)))
    search = Search(problem)
    schedule = search.schedule
    made = schedule._forward_made
    residual = 2 * 32 * 32 * 4
    adds = [s.index for s in problem.storages if "aten.add" in str(s.node.target) and s.bytes == residual]
    inputs = [s for s in adds if s in made][1::2]  # the second sum of each block is the next one's input
    by_hand = schedule.run(State(kept=set(inputs) | (search._pinned & made)))
    assert search.floor <= by_hand.peak


@pytest.mark.slow
def test_of_a_long_loop_as_many_plans_are_tried(programs, monkeypatch):
    """Of some 1,700 operations, the effort of smaller graphs is a hundred trials, and ends before plans are fast."""
    torch.manual_seed(0)
    problem = programs.problem_of(programs.joint_of(programs.Scan(48), torch.randn(8, 48, 8)))
    assert len(problem.operations) > refill.LARGE
    taken = []
    for large in (refill.LARGE, 10**6):
        monkeypatch.setattr(refill, "LARGE", large)
        search = Search(problem)
        found = search.at_most((search.floor + search.unconstrained) // 2)
        assert found is not None
        taken.append(found[1].recomputed_s)
    assert taken[0] < taken[1]


def test_what_must_not_run_twice_never_does(programs):
    torch.manual_seed(0)
    model = programs.Stack(3, dropout=0.2).train()
    joint = programs.joint_of(model, torch.randn(2, 24, 16))
    problem = programs.problem_of(joint)
    search = Search(problem)
    drawn = [o.index for o in problem.operations if o.kept_why and o.forward]
    assert drawn  # the seeds
    for point in search.way.points:
        timeline = search.schedule.run(search.state_at(point.moves))
        assert not set(drawn) & set(timeline.steps)


def test_cheap_operations_go_first(joints, programs):
    """Of two tensors of one size the one that is cheap to make is let go of first."""
    joint = joints["branches"][2]
    dear = {n.name for n in joint.graph.nodes if "mm" in str(n.target)}

    def price(node) -> Price:
        return Price(1.0 if node.name in dear else 1e-3)

    forward, backward = joint.outputs()
    from optpass.passes.memory.problem import build

    problem = build(joint.graph, forward, backward, saved=joint.saved, price=price, hint=int)
    search = Search(problem)
    costs = [problem.operations[problem.storages[m.drop[0]].producer].seconds for m in search.way.moves if m.drop]
    assert costs[: len(costs) // 2] == sorted(costs[: len(costs) // 2])


def test_sizes_are_rounded_as_the_allocator_does(joints, programs):
    problem = programs.problem_of(joints["chain"][2], granularity=512)
    assert all(s.bytes % 512 == 0 for s in problem.storages)
