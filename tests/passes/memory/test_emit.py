"""A joint graph written anew computes the same bits, whatever the plan."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from optpass.passes.memory import offload, transfers
from optpass.passes.memory.emit import RECOMPUTED, rewrite
from optpass.passes.memory.search.schedule import Schedule, State
from optpass.passes.memory.search.search import Search
from optpass.passes.memory.storage import view_base


def inputs_of(graph, seed):
    torch.manual_seed(seed)
    found = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        made = torch.randn([int(n) for n in value.shape])
        found.append(made.as_strided(value.shape, value.stride()) if made.numel() == value.numel() else made)
    return found


def run(module, inputs):
    return [o for o in fx.Interpreter(module).run(*inputs) if isinstance(o, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "outside", "chain", "branches"])
def test_outputs_are_bitwise_equal(joints, programs, name):
    joint = joints[name][2]
    module = fx.GraphModule(torch.nn.Module(), joint.graph)
    problem = programs.problem_of(joint)
    search = Search(problem)
    schedule = search.schedule
    inputs = inputs_of(joint.graph, 3)
    wanted = run(module, inputs)
    rng = random.Random(name)
    states = [search.state_at(p.moves) for p in search.way.points[:: max(1, len(search.way.points) // 4)]]
    for _ in range(3):
        state = State(kept={s for s in schedule._forward_made if rng.random() < 0.5})
        for _ in range(8):
            again = rng.choice(sorted(schedule._forward_made))
            state.evicted.setdefault(rng.randrange(len(schedule.anchors)), set()).add(again)
        states.append(state)
    for state in states:
        written, saved = rewrite(module, problem, schedule.run(state))
        assert all(torch.equal(a, b) for a, b in zip(run(written, inputs), wanted, strict=True))
        assert {n.op for n in saved} <= {"placeholder", "call_function"}


def test_copies_are_marked_and_stand_behind_the_forward(joints, programs):
    joint = joints["stack"][2]
    module = fx.GraphModule(torch.nn.Module(), joint.graph)
    problem = programs.problem_of(joint)
    search = Search(problem)
    timeline = search.at_most(search.floor)[1]
    written, _ = rewrite(module, problem, timeline)
    order = {n: i for i, n in enumerate(written.graph.nodes)}
    copies = [n for n in written.graph.nodes if n.meta.get(RECOMPUTED)]
    outputs = next(n for n in reversed(written.graph.nodes) if n.op == "output").args[0]
    assert len(copies) == sum(not problem.operations[i].backward for i in timeline.steps)
    assert min(order[n] for n in copies) > order[outputs[0]]


def _computing(nodes):
    """Those of `nodes` that compute, and what computes with views among them."""
    views = [n for n in nodes if view_base(n) is not None]
    return [n for n in nodes if n not in views] + [n for view in views for n in _computing(view.users)]


@pytest.mark.parametrize("name", ["stack", "outside", "chain", "branches"])
def test_copies_to_the_host_stand_where_the_plan_has_them(joints, programs, monkeypatch, name):
    monkeypatch.setattr(offload, "SMALLEST", 1)
    joint = joints[name][2]
    module = fx.GraphModule(torch.nn.Module(), joint.graph)
    problem = programs.problem_of(joint)
    search = Search(problem)
    inputs = inputs_of(joint.graph, 3)
    wanted = run(module, inputs)
    points = search.way.points
    for point in (points[0], points[-1]):
        base = search.schedule.run(search.state_at(point.moves))
        timeline = offload.moved(base, offload.hidden_offloads(search.schedule, base, offload.Host(1e11)))
        written, saved = rewrite(module, problem, timeline)
        assert all(torch.equal(a, b) for a, b in zip(run(written, inputs), wanted, strict=True))
        copies = [node for node in saved if node.target is transfers.OFFLOADED]
        assert len(copies) == len(timeline.offloaded) and (copies or point is not points[0])
        written.graph.eliminate_dead_code()
        order = {n: i for i, n in enumerate(written.graph.nodes)}
        for host in copies:
            ticket, source = host.args
            assert ticket.target is transfers.OFFLOAD and ticket.args == (source,) and source not in saved
            (come,) = [n for n in host.users if n.target is transfers.RELOADED]
            assert come.args[0].target is transfers.RELOAD and come.args[0].args == (host, come.args[2])
            assert order[source] < order[ticket] < order[host] < order[come.args[0]] < order[come]
            readers = [n for n in source.users if n not in (ticket, host)]
            assert all(
                order[n] < order[host] for n in _computing(readers)
            )  # whoever comes later reads what has come back


def test_the_joint_graph_is_left_as_it_is(joints, programs):
    joint = joints["chain"][2]
    before = str(joint.graph)
    module = fx.GraphModule(torch.nn.Module(), joint.graph)
    problem = programs.problem_of(joint)
    rewrite(module, problem, Schedule(problem).run(State(kept=set(problem.baseline))))
    assert str(joint.graph) == before
