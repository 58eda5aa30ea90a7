"""The search against an exact integer program with the same cost model, on graphs that one can be solved for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from optpass.passes.memory.search.schedule import Schedule, State
from optpass.passes.memory.search.search import Search

#: How much longer than the best plan's a step may take.
NEAR = 1.03
SHARES = (0.0, 0.25, 0.6, 0.95)


class Attention(nn.Module):
    """One attention layer with its norm and residual sum."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) * 0.35).softmax(-1) @ v
        return (x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))).square().mean()


@pytest.fixture(scope="module")
def exact():
    path = Path(__file__).with_name("exact.py")
    spec = importlib.util.spec_from_file_location("memory_exact", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def searches(joints, programs):
    torch.manual_seed(0)
    attention = programs.joint_of(Attention(), torch.randn(2, 24, 16))
    found = {"attention": attention, "chain": joints["chain"][2], "branches": joints["branches"][2]}
    assert all(len(joint.graph.nodes) <= 150 for joint in found.values())
    return {name: Search(programs.problem_of(joint)) for name, joint in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["chain", "branches", "attention"])
def test_a_plan_is_near_the_optimum(searches, exact, name, share):
    search = searches[name]
    budget = int(search.floor + share * (search.unconstrained - search.floor))
    found = search.at_most(budget)
    assert found is not None and found[1].peak <= budget
    best = exact.optimum(search.schedule, budget)
    assert best is not None and best.proven
    step = sum(o.seconds for o in search.problem.operations if o.forward or o.backward)
    assert best.bound <= found[1].recomputed_s * (1 + 1e-6)  # else the program is not of the same cost model
    assert step + found[1].recomputed_s <= NEAR * (step + best.bound)


@pytest.mark.parametrize("name", ["chain", "branches", "attention"])
def test_the_exact_program_agrees_with_the_schedule(searches, exact, name):
    """What the schedule can do, the program can: a budget of exactly a plan's peak is no dearer than that plan."""
    schedule: Schedule = searches[name].schedule
    everything = schedule.run(State(kept=set(schedule._forward_made)))
    best = exact.optimum(schedule, everything.peak)
    assert best is not None and best.bound <= everything.recomputed_s * (1 + 1e-6)
    assert exact.optimum(schedule, everything.peak // 4) is None
