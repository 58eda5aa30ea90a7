"""Training files with a budget: what they may say, how they are planned, and what a run holds, measures and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optpass.errors import BudgetInfeasibleError, ConfigError
from optpass.reporting.plan.model import PlanReport
from optpass.training.config import TrainingConfig, load
from optpass.training.loop import OPTIMIZERS, make_optimizer
from optpass.training.planned import plan_file, plan_job, sized
from optpass.training.run import execute, prepare

pytestmark = pytest.mark.usefixtures("hasty")

JobFile = Callable[..., Path]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def example_plan() -> PlanReport:
    """The example for the CPU, planned for a device of the table and with fewer layers, which takes less time."""
    job = load(EXAMPLES / "gpt-budget.toml")
    small = {**job.config.architecture, "layers": 2}
    config = job.config.model_copy(update={"architecture": small})
    options = job.options.override({"device": "h100", "memory_budget": "70MB"})
    return plan_job(replace(job, config=config, options=options))


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    job = load(path)
    assert job.config.name == path.stem
    if "budget" in path.stem:
        assert job.options.memory_budget == job.config.memory_budget is not None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"memory_budget": '"20GX"'}, ["memory_budget = '20GX'", "'20GiB'", "'80%'"]),
        ({"memory_budget": "0"}, ["memory_budget = 0", "'20GiB'"]),
        ({"memory_budget": "-5"}, ["memory_budget = -5"]),
        ({"memory_budget": "true"}, ["memory_budget = True"]),
        ({"micro_batch": '"all"'}, ["micro_batch = 'all'", "'auto'"]),
        ({"micro_batch": '"auto"'}, ["micro_batch = 'auto'", "set memory_budget"]),
        ({"optimizer": '"sgdd"'}, ["optimizer = 'sgdd'", "'adamw'"]),
        ({"precision": '"fp8"'}, ["precision = 'fp8'", "'bf16-true'"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_values_name_file_key_and_valid_forms(job_file: JobFile, values: dict[str, str], said: list[str]) -> None:
    path = job_file(**values)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert all(part in str(caught.value) for part in [str(path), *said]), str(caught.value)


def test_the_budget_is_given_once(job_file: JobFile) -> None:
    path = job_file(memory_budget='"1GB"', options='inner = "eager"\nmemory_budget = "2GB"')
    with pytest.raises(ConfigError, match="give one"):
        load(path)
    same = job_file(memory_budget='"1GB"', options='inner = "eager"\nmemory_budget = "1GB"')
    assert load(same).options.memory_budget == "1GB"
    assert load(job_file(options='inner = "eager"\nmemory_budget = "2GB"')).options.memory_budget == "2GB"


def test_every_optimizer_can_be_made_and_is_in_the_ledger() -> None:
    from torch import nn

    from optpass.passes.memory.optimizers import optimizers

    for name, choice in OPTIMIZERS.items():
        made = make_optimizer(nn.Linear(3, 4), TrainingConfig(optimizer=name))  # type: ignore[arg-type]
        assert type(made).__name__ == choice.kind and optimizers.named(choice.ledger).kind == choice.kind


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_is_of_the_loop(example_plan: PlanReport) -> None:
    assert example_plan.target == "gpt:small" and example_plan.device.key == "h100"
    assert example_plan.inputs == "int64[8, 192], int64[8, 192]" and example_plan.batch.size == 8
    assert example_plan.accumulation == 2 and example_plan.optimizer == "adamw"
    ledger = example_plan.ledger
    # Two micro-batches: the gradients of the first are there while the second runs. AdamW runs as one fused kernel.
    assert ledger.gradients >= ledger.parameters
    assert ledger.optimizer == pytest.approx(2 * ledger.parameters, rel=0.02)
    assert example_plan.predicted_peak_bytes <= 70_000_000


REFUSED = [
    ({"model": "vocab = 131"}, r"vocab = 131 is smaller than the 256 tokens of tokenizer = 'byte'"),
    ({"sequence": "33"}, r"sequence = 33 is longer than the model's context = 32"),
    ({"data": '"none.txt"'}, r"none\.txt.*no such file"),
    ({"tokenizer": '"char"', "model": "vocab = 5"}, r"vocab = 5 is smaller than the \d+ tokens of tokenizer = 'char'"),
    ({"device": '"tpu"'}, r"\[training\] device = 'tpu' cannot be used"),
    ({"device": '"h200"'}, r"\[training\] device = 'h200' cannot be used: .* --device"),
    ({"options": 'device = "nope"'}, r"\[options\] device='nope': no device 'nope'"),
    ({"options": 'optimizer = "adamx"'}, r"\[options\] optimizer='adamx': no such optimizer"),
    ({"options": 'disable_passes = ["attn"]'}, r"\[options\] disable_passes: no pass is called 'attn'"),
    ({"options": 'inner = "egaer"'}, r"\[options\] inner='egaer': no such backend"),
    ({"micro_batch": str(10**30)}, r"\[training\] micro_batch = 10{30}: .*"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_plan_refuses_what_a_run_refuses(job_file: JobFile, changes: dict[str, str], said: str) -> None:
    path = job_file(**changes)
    with pytest.raises(ConfigError, match=rf"^{path}: .*{said}|^{path}: {said}"):
        plan_file(path)
    with pytest.raises(ConfigError, match=rf"^{path}: .*{said}|^{path}: {said}"):
        prepare(load(path))


def test_a_device_that_has_no_figures_is_told_with_its_place(job_file: JobFile) -> None:
    path = job_file(device='"meta"')
    with pytest.raises(ConfigError, match=rf"^{path}: \[training\] device = 'meta': no figures for devices"):
        plan_file(path)


def test_the_large_example_is_planned_without_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of the 8B model at its full length: nothing of it is allocated."""
    import resource

    job = load(EXAMPLES / "llama-budget.toml")
    config = job.config.model_copy(update={"architecture": {"layers": 2}})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_job(replace(job, config=config))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB
    assert plan.dtype == "bfloat16" and plan.ledger.parameters == pytest.approx(2 * plan.parameter_count, rel=0.01)
    assert plan.ledger.optimizer == pytest.approx(4 * plan.parameter_count, rel=0.01)


def test_a_cuda_file_needs_a_named_device_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example = (EXAMPLES / "llama-budget.toml").read_text(encoding="utf-8")
    file = tmp_path / "job.toml"
    file.write_text("\n".join(line for line in example.splitlines() if not line.startswith('device = "h200"')))
    with pytest.raises(ConfigError, match=r"device = 'cuda' is not here; name the device to plan for with --device"):
        plan_file(file)


def test_flags_win_over_the_file(job_file: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from optpass.training import planned

    asked: list[Any] = []
    monkeypatch.setattr(planned, "plan_step", lambda request: asked.append(request))
    flags = {"batch": "3", "accumulation": 4, "optimizer": "lion", "device": "h100", "shard": "fsdp:2"}
    plan_file(job_file(memory_budget='"1GB"'), flags={**flags, "memory_budget": "2GB"})
    (request,) = asked
    assert (request.batch, request.accumulation, request.optimizer) == (3, 4, "lion")
    assert request.device.key == "h100" and request.shard.world_size == 2 and request.budget.amount == 2 * 10**9
    plan_file(job_file(memory_budget='"1GB"'), flags={"batch": "auto", "device": "h100"})
    assert asked[1].search_batch and asked[1].batch is None and asked[1].settings["fused"] is True
    with pytest.raises(ConfigError, match="lionn"):
        plan_file(job_file(memory_budget='"1GB"'), flags={"optimizer": "lionn", "device": "h100"})


def test_a_job_without_a_budget_is_not_planned(job_file: JobFile) -> None:
    job = load(job_file())
    assert sized(job) == (job, None)


def test_a_micro_batch_that_is_to_be_found_is_found_with_headroom(
    job_file: JobFile, monkeypatch: pytest.MonkeyPatch, example_plan: PlanReport
) -> None:
    from optpass.training import planned

    asked: list[Any] = []

    def answer(request: Any) -> PlanReport:
        asked.append(request)
        return example_plan

    monkeypatch.setattr(planned, "plan_step", answer)
    job, plan = sized(load(job_file(micro_batch='"auto"', memory_budget='"1GB"')))
    assert job.config.micro_batch == example_plan.batch.size == 8 and plan is example_plan
    assert job.config.tokens_per_step == 8 * 16 and asked[0].search_batch and 0 < asked[0].headroom < 0.1
    same, _ = sized(load(job_file(micro_batch="4", memory_budget='"1GB"')))
    assert same.config.micro_batch == 4 and asked[1].batch == 4
    with pytest.raises(ConfigError, match="has not been turned into a number"):
        _ = load(job_file(micro_batch='"auto"', memory_budget='"1GB"')).config.tokens_per_step


# ---- the run --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_holds_its_budget_and_says_what_it_measured(job_file: JobFile) -> None:
    model = "vocab = 257\ncontext = 64\nlayers = 1\nwidth = 48"
    common = {"sequence": "64", "accumulation": "2", "model": model, "options": 'inner = "aot_eager"'}
    free = plan_job(load(job_file(micro_batch="8", **common)))
    budget = (free.floor_bytes + free.unconstrained_bytes) // 2
    prepared = prepare(load(job_file(micro_batch="8", memory_budget=str(budget), **common)))
    assert prepared.plan is not None and prepared.plan.budget_bytes == budget
    outcome = execute(prepared, lambda event, other: None)
    memory = outcome.memory
    assert memory is not None and memory.fits and memory.budget == budget
    assert 0.9 * budget <= memory.measured <= budget
    assert abs(memory.predicted - memory.measured) <= 0.02 * memory.measured
    assert outcome.report.training["memory"] == memory.to_json()


def test_a_budget_that_nothing_fits_stops_before_training(job_file: JobFile) -> None:
    with pytest.raises(BudgetInfeasibleError, match="smallest peak of any plan"):
        prepare(load(job_file(memory_budget='"100KB"')))
