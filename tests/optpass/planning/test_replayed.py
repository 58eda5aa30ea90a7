"""A plan made ahead for this processor is the one that a compile of the step chooses, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import optpass
from optpass.errors import BudgetInfeasibleError
from optpass.passes.devices import resolve
from optpass.planning import plan as planning
from optpass.planning.replayed import MOST_NODES, Replayed
from optpass.planning.request import Request
from optpass.units import parse_budget


class Block(nn.Module):
    """Attention by hand and a feed-forward layer, both with dropout."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.mT * 0.25).softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, c))
        mixed: Tensor = x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)
        return mixed


class Stack(nn.Module):
    """Blocks, and their loss; `again`: each under a checkpoint of the user's."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(2)), again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


class Pair(nn.Module):
    """One network run twice, and a loss of both of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 24))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = F.normalize(self.net(x), dim=-1) @ F.normalize(self.net(y), dim=-1).T
        return F.cross_entropy(found, torch.arange(len(x)))


STEPS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {
    "dropout": lambda: (Stack(), [torch.randn(4, 24, 32)]),
    "checkpointed": lambda: (Stack(again=True), [torch.randn(4, 24, 32)]),
    "pair": lambda: (Pair(), [torch.randn(64, 48), torch.randn(64, 48)]),
}


def run(name: str, inner: str, *budgets: int) -> list[dict[str, float]]:
    """The figures of a compile for each budget, in a process of its own: what else is alive here would count."""
    words = [sys.executable, __file__, name, inner, *map(str, budgets)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    figures: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _run(name: str, inner: str, budget: int) -> dict[str, float]:
    torch._dynamo.reset()
    optpass.reset_report()
    model, inputs = STEPS[name]()
    options = {"optimizer": "adamw", "inner": inner, "memory_budget": budget}
    torch.compile(model, backend="optpass", options=options)(*inputs).backward()
    report = optpass.report()
    (site,) = [s for s in (*report.sites(), *report.declined()) if s.kind == "memory budget"]
    return dict(site.cost)


@pytest.mark.parametrize("name", STEPS)
def test_as_a_run_that_stands_as_it_is(name: str) -> None:
    model, inputs = STEPS[name]()

    def planned(budget: int | None) -> Any:
        options = {"inner": "aot_eager"}
        return optpass.plan(model, *inputs, optimizer="adamw", memory_budget=budget, loss=torch.sum, options=options)

    loosest = planned(None)
    low, high = loosest.floor_bytes, loosest.unconstrained_bytes
    assert loosest.predicted_peak_bytes == high == loosest.pareto[0].peak_bytes and loosest.pareto[-1].peak_bytes == low
    budgets = low, (low + high) // 2, high
    for budget, found in zip(budgets, run(name, "aot_eager", *budgets), strict=True):
        plan = planned(budget)
        assert plan.predicted_peak_bytes == plan.ledger.total == found["predicted_peak_bytes"] <= budget
        assert plan.floor_bytes == low
    with pytest.raises(BudgetInfeasibleError) as refused:
        planned(low - 1)
    assert refused.value.floor_bytes == low


def test_as_a_run_under_inductor() -> None:
    model, inputs = STEPS["pair"]()

    def planned(budget: int | None) -> Any:
        return optpass.plan(model, *inputs, optimizer="adamw", memory_budget=budget, loss=torch.sum)

    loosest = planned(None)
    budget = (2 * loosest.floor_bytes + loosest.unconstrained_bytes) // 3
    plan = planned(budget)
    top, tight = run("pair", "inductor", 10**9, budget)
    assert loosest.predicted_peak_bytes == top["predicted_peak_bytes"]
    assert plan.predicted_peak_bytes == tight["predicted_peak_bytes"]
    assert plan.floor_bytes <= plan.predicted_peak_bytes <= min(budget, plan.unconstrained_bytes)
    assert any(note.startswith("the smallest peak is an estimate") for note in plan.notes)


def test_what_is_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, state that is divided, and graphs so large that it would take long."""
    asked: list[int | None] = []
    plan = Replayed.plan
    monkeypatch.setattr(Replayed, "plan", lambda self, budget: (asked.append(budget), plan(self, budget))[1])
    model, inputs = STEPS["pair"]()
    how: dict[str, Any] = {"optimizer": "adamw", "loss": torch.sum, "options": {"inner": "aot_eager"}}
    optpass.plan(model, *inputs, device="h100", **how)
    optpass.plan(model, *inputs, shard="fsdp:2", **how)
    monkeypatch.setitem(MOST_NODES, "aot_eager", 10)
    optpass.plan(model, *inputs, **how)
    assert not asked
    monkeypatch.setitem(MOST_NODES, "aot_eager", 1_000)
    optpass.plan(model, *inputs, **how)
    assert asked == [None]


class Broken(nn.Module):
    """Breaks inside a loop, so that Dynamo leaves the whole to eager."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            torch._dynamo.graph_break()
        return x.square().mean()


def test_what_runs_in_eager_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compile plans it, so that there is none to ask."""
    monkeypatch.setattr(Replayed, "plan", None)
    plan = optpass.plan(Broken(), torch.randn(8, 16), optimizer="adamw", loss=torch.sum)
    assert any(note.startswith("torch.compile leaves parts of this model to eager") for note in plan.notes)
    model, inputs = STEPS["pair"]()
    monkeypatch.setitem(MOST_NODES, "aot_eager", 0)
    plan = optpass.plan(model, *inputs, optimizer="adamw", loss=torch.sum, options={"inner": "aot_eager"})
    assert not any("eager," in note for note in plan.notes)


def test_a_smaller_batch_where_what_is_counted_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan needs is known when it is replayed, and the largest batch that was counted may not fit."""
    model, inputs = STEPS["pair"]()
    how: dict[str, Any] = {"optimizer": "adamw", "loss": torch.sum, "options": {"inner": "aot_eager"}}
    budget = optpass.plan(model, *inputs, **how).floor_bytes
    whole = optpass.plan(model, *inputs, memory_budget=budget, batch="auto", **how)
    assert whole.batch.size is not None and whole.batch.size >= len(inputs[0])
    plan = Replayed.plan
    size = whole.batch.size

    def refused(self: Replayed) -> bool:
        shapes = (n.meta["val"].shape for n in self.joint.graph.find_nodes(op="placeholder"))
        return any(shape == (size, 48) for shape in shapes)

    monkeypatch.setattr(Replayed, "plan", lambda self, budget: None if refused(self) else plan(self, budget))
    fewer = optpass.plan(model, *inputs, memory_budget=budget, batch="auto", **how)
    assert fewer.batch.size is not None and fewer.batch.size == size - max(1, size // 32)
    assert fewer.batch.size in dict(fewer.batch.tried) and fewer.predicted_peak_bytes <= budget


def test_a_run_that_plans_for_itself_is_told_what_is_counted(
    request_for_chain: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where it would be refused."""
    asked: list[int | None] = []

    def plan(self: Replayed, budget: int | None) -> None:
        asked.append(budget)

    monkeypatch.setattr(Replayed, "plan", plan)
    monkeypatch.setattr(planning, "replayable", lambda request, joints: True)
    request = replace(request_for_chain, device=resolve("cpu"), quick=True)
    assert planning.plan_step(request).predicted_peak_bytes and not asked
    with pytest.raises(BudgetInfeasibleError):
        planning.plan_step(replace(request, budget=parse_budget(1000)))
    assert asked == [1000]


def test_a_replay_that_fails_leaves_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Replayed, budget: int | None) -> None:
        raise NotImplementedError("no lowering\nof that")

    monkeypatch.setattr(Replayed, "plan", fail)
    model, inputs = STEPS["pair"]()
    plan = optpass.plan(model, *inputs, optimizer="adamw", loss=torch.sum)
    assert plan.predicted_peak_bytes >= plan.floor_bytes > 0
    assert "plans are counted, not replayed: NotImplementedError: no lowering" in plan.notes


if __name__ == "__main__":
    print(json.dumps([_run(sys.argv[1], sys.argv[2], int(budget)) for budget in sys.argv[3:]]))
