"""Requests answered: records, sharding, and errors that say what would help."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import optpass
from optpass.errors import BudgetInfeasibleError, ConfigError, TraceError
from optpass.passes import devices
from optpass.passes.memory import describe
from optpass.passes.memory.optimizers.optimizers import OptimizerCost
from optpass.planning import plan as planning
from optpass.planning.plan import Solved, no_plan, plan_step, solve
from optpass.planning.request import Request
from optpass.planning.shard import Shard
from optpass.reporting.plan.model import PlanReport
from optpass.units import parse_budget


@pytest.fixture
def answer(request_for_chain: Request, solved: Solved, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers requests about the chain without tracing it again."""
    monkeypatch.setattr(planning, "solve", lambda request, batch: solved)

    def ask(**changes: Any) -> PlanReport:
        return plan_step(replace(request_for_chain, **changes))

    return ask


def test_the_record_of_an_unconstrained_step(answer: Any, solved: Solved) -> None:
    report = answer()
    assert report.budget_bytes is None and report.optimizer == "adamw" and report.device.key == "h100"
    assert report.predicted_peak_bytes == report.unconstrained_bytes == report.ledger.total
    assert not report.recomputed and report.overhead.predicted_slowdown == 1.0
    assert report.batch.size == 512 and not report.batch.searched and report.inputs == "float32[512, 24]"
    assert report.parameter_count == 24 * 64 + 64 + 6 * (64 * 64 + 64)
    saved = {tensor.tensor: tensor for tensor in report.saved}
    assert len(saved) == len(report.saved) and all(t.bytes > 0 and t.file and t.line for t in report.saved)
    assert {t.module for t in report.saved} >= {"blocks.0", "blocks.5"}


def test_the_record_of_a_budget(answer: Any, solved: Solved) -> None:
    middle = (solved.planner.floor + solved.planner.unconstrained) // 2
    report = answer(budget=parse_budget(middle))
    assert report.budget_bytes == middle >= report.predicted_peak_bytes == report.ledger.total
    assert report.recomputed and report.overhead.predicted_slowdown > 1.0
    assert report.overhead.recompute_us == pytest.approx(sum(t.time_us * t.copies for t in report.recomputed))
    flops = sum(t.flops * t.copies for t in report.recomputed)
    assert report.overhead.recompute_flops_fraction == pytest.approx(flops / solved.planner.flops)
    assert report.offload is not None and report.offload.link_bytes_per_s == report.offload.link_bytes_per_s
    assert PlanReport.model_validate_json(report.model_dump_json(by_alias=True)) == report


@pytest.mark.parametrize(("device", "suffix"), [("h100", ""), ("cpu", "_for_cpu")])
def test_operators_have_the_names_of_the_device(answer: Any, monkeypatch: Any, device: str, suffix: str) -> None:
    """What is planned was traced for the CPU, whatever it is planned for."""
    tensors = describe.saved_tensors
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    monkeypatch.setattr(describe, "saved_tensors", lambda *a: tuple(replace(t, op=attention) for t in tensors(*a)))
    report = answer(device=devices.resolve(device))
    assert {t.op for t in report.saved} == {f"aten._scaled_dot_product_flash_attention{suffix}.default"}


class Layers(nn.Module):
    """Square layers, of which each saves what takes about as long to copy as to compute."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().square().mean()


@pytest.mark.slow
def test_what_a_budget_has_in_host_memory() -> None:
    model = Layers(8, 8192).to(device="meta", dtype=torch.bfloat16)
    x = torch.empty(16384, 8192, dtype=torch.bfloat16, device="meta")
    whole = optpass.plan(model, x, device="h200", optimizer="none")
    assert whole.offload is not None and whole.offload.tensors and not whole.offload.runs
    budget = (whole.floor_bytes + whole.unconstrained_bytes) // 2
    report = optpass.plan(model, x, device="h200", optimizer="none", memory_budget=budget)
    assert report.offload is not None and report.offload.runs and report.offload.pays
    assert sum(t.bytes for t in report.offload.tensors) == report.offload.frees_bytes
    assert report.offload.hidden_us == pytest.approx(sum(t.transfer_us for t in report.offload.tensors))
    assert 0 < report.offload.replaces_us <= report.overhead.recompute_us * 1.01
    assert all(t.file and t.line for t in report.offload.tensors)


class Attention(nn.Module):
    """Heads of width 32, their attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4).unbind()
        weights = torch.softmax(q @ k.mT * 32**-0.5, dim=-1)
        found: torch.Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return found


@pytest.mark.parametrize(("device", "dtype"), [("h200", "bf16"), ("cpu", "f32")])
def test_fused_attention_has_the_operands_of_the_device(device: str, dtype: str) -> None:
    """Torch's kernel for CPUs is given half precision in float32, to be as exact as the program; those of GPUs not."""
    inputs = torch.randn(4, 256, 64, dtype=torch.bfloat16)
    options = {"attention": "always"}
    plan = optpass.plan(Attention().bfloat16(), inputs, device=device, options=options, loss=torch.Tensor.sum)
    saved = [tensor.shape for tensor in plan.saved if "scaled_dot_product" in tensor.op]
    assert saved and {shape.partition("[")[0] for shape in saved} == {dtype}


def test_a_share_of_the_device_and_more_than_it_has(answer: Any) -> None:
    report = answer(budget=parse_budget("50%"))
    assert report.budget_bytes == devices.resolve("h100").memory_bytes // 2
    with pytest.raises(ConfigError, match="is more than NVIDIA H100"):
        answer(budget=parse_budget("800GiB"), where="--budget='800GiB'")


def test_an_infeasible_budget_says_what_would_help(request_for_chain: Request, solved: Solved) -> None:
    budget = solved.planner.floor - 200_000
    error = no_plan(replace(request_for_chain, where="--budget"), solved, budget)
    assert isinstance(error, BudgetInfeasibleError) and error.floor_bytes == solved.planner.floor
    said = str(error)
    assert said.startswith("--budget: no plan of this training step fits")
    assert "conftest.py:" in said and "blocks." in said  # the largest tensors, where they are made
    micro = re.search(r"micro-batch (\d+), about \(smallest peak", said)
    assert micro is not None and 1 <= int(micro[1]) < 512
    assert "the state of adamw in bfloat16" in said and "sharding over 8 devices" in said


def test_sharding_divides_the_state(request_for_chain: Request, solved: Solved) -> None:
    shard = Shard("fsdp", 4)
    other = solve(replace(request_for_chain, shard=shard), None)
    whole, part = solved.state, other.state
    assert part.parameters == -(-whole.parameters // 4) and part.gradients == -(-whole.gradients // 4)
    assert part.optimizer.state_bytes == -(-whole.optimizer.state_bytes // 4)
    assert other.gathered.layer.startswith("blocks.") and other.gathered.parameters == 64 * 64 * 4 + 512
    plan, before = other.planner.plan(None), solved.planner.plan(None)
    assert plan is not None and before is not None
    assert plan.ledger.parameters == part.parameters
    assert plan.ledger.temporaries >= other.gathered.bytes
    made = other.planner.graphs[0].gradients
    assert 0.25 * solved.planner.graphs[0].gradients <= made < 0.3 * solved.planner.graphs[0].gradients


def test_accumulation_has_gradients_from_the_start(request_for_chain: Request, solved: Solved) -> None:
    other = solve(replace(request_for_chain, accumulation=2), None)
    assert other.planner.fixed.throughout == solved.planner.fixed.throughout + solved.state.gradients


def test_an_optimizer_that_was_found_is_counted(request_for_chain: Request) -> None:
    cost = OptimizerCost("own", 12_345, 678)
    other = solve(replace(request_for_chain, optimizer=None, found=lambda _: cost), None)
    assert other.state.optimizer == cost


def test_several_graphs_are_planned_together(solved: Solved, solved_in_two: Solved) -> None:
    assert len(solved_in_two.planner.graphs) > 1
    assert solved_in_two.planner.fixed == solved.planner.fixed
    ratio = solved_in_two.planner.unconstrained / solved.planner.unconstrained
    assert 0.95 < ratio < 1.3  # an upper bound, but no wild one
    plan = solved_in_two.planner.plan(solved_in_two.planner.floor)
    assert plan is not None and any("3" in (t.module or "") for t in plan.saved + plan.recomputed)


def test_without_a_backward_there_is_no_step(capture_of: Any) -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    request = Request(capture=capture_of(model, torch.randn(4, 8)), device=devices.resolve("h100"))
    with pytest.raises(TraceError, match="no backward"):
        solve(request, None)


class Idle(nn.Module):
    """Half of the body is in front of `detach`, and nothing reads the second head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head, self.other = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).detach()
        if x.shape[0] > 100:
            torch._dynamo.graph_break()
        return self.head(self.second(hidden).relu()).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_what_no_gradient_reaches_has_none_and_no_state(rows: int, found: bool) -> None:
    model, x = Idle(), torch.randn(rows, 32)
    holding = torch.optim.AdamW(model.parameters()) if found else None
    report = optpass.plan(model, x, optimizer=None if found else "adamw", options={"inner": "aot_eager"})
    trained = 2 * (32 * 32 + 32) * 4
    assert report.ledger.parameters == 2 * trained and report.optimizer == "adamw"
    assert 2 * trained <= report.ledger.optimizer <= 2 * trained + 64
    assert holding is None or not holding.state
