"""Claim: a memory budget holds, is used, is predicted, and costs no more than what people use instead.

On the CPU, in one process per model (`memory_ways`): three curves of peak and step time side by side, namely optpass
at budgets between its floor and its unconstrained peak and at every peak that PyTorch's `activation_memory_budget`
reaches; that sweep itself; and checkpointing of every block by hand, eager and compiled. Peaks are bytes above what is
there before the step (parameters, buffers, inputs); no optimizer is counted. A step is forward, backward, and letting
go of the gradients; its time is processor time on one thread, all ways interleaved in rounds. Dropout is off: PyTorch's
budgets below 1 draw other masks in the backward. 70% fewer activation bytes: 30% of what the unconstrained step
needs beside the gradients that it leaves behind.

Compile time is that of cold processes (`memory_compile`), interleaved; planning is the partitioner's processor time
for stacks of layers. On CUDA, `memory_cuda` measures a Llama in bfloat16 instead. `memory_judge` draws the verdicts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from typing import Any

from optpass.bench import memory_compile, memory_journal, memory_judge, memory_ways
from optpass.bench.clocks import check_device
from optpass.bench.environment import environment
from optpass.bench.harness import schedule
from optpass.bench.isolate import run_isolated
from optpass.bench.memory_judge import Verdict
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, sample_rows

CLAIM = (
    "Measured peaks are 95% to 100% of the budget and within 0.5% of the prediction; steps take no longer than under "
    "PyTorch's activation_memory_budget at each of its peaks, and at most 10% longer at 70% fewer activation bytes; "
    "the floor is at most eager checkpointing's peak; compiling takes at most 1.6 times Inductor's time."
)
RATIOS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
FRACTIONS = (0.1, 0.4, 0.7)
ROUNDS, COMPILE_ROUNDS = 10, 5
#: Wall seconds for the rounds of step times, and for those of compile times.
BUDGET_S, COMPILE_BUDGET_S = 240.0, 480.0
#: Overrides of a model's size: its loss in the graph and no dropout where it has such fields, activations that matter.
OVERRIDES: Mapping[str, Any] = {"targets": True, "dropout": 0.0}
LARGER: Mapping[str, Any] = {"layers": 4, "batch": 4, "seq": 256}
#: Layers of the stacks that planning is timed on: about 2,000 and 10,000 nodes of the joint graph.
LAYERS = (12, 60)
#: Of the processes that measure.
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A plan out of a cache would be reported by nobody.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


@dataclass
class _Measured:
    """What was measured of one model, and what it says."""

    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the curves of each model, compile time and planning, and judge each part of the claim.

    Raises:
        ConfigError: an unknown model or size, or no such device.
        BenchError: a model could not be run; the line names it.
    """
    check_device(config.device)
    if config.device == "cuda":
        from optpass.bench import memory_cuda

        return memory_cuda.run(config, progress)
    models = config.models or ("gpt",)
    size = config.size or "small"
    before = environment(config.device)
    progress.start(len(models) + 2)
    found = _Measured()
    for model in models:
        _model(found, model, size, config, progress)
    if not config.models:
        _planning(found, config, progress)
    passed, finding = memory_judge.conclude(found.verdicts)
    return Result(
        name="memory",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config) | {"models": models, "size": size, "overrides": [_overrides(m, config) for m in models]}
        | {"inner": config.inner, "ratios": _ratios(config), "fractions": _fractions(config), "environ": ENVIRON},
        rows=tuple(found.rows),
        passed=passed if config.full else None if passed else passed,
        finding=finding,
        notes=(
            "times are processor seconds of one thread; peaks are above parameters, buffers and inputs",
            "optpass compiles with all of its passes, fused attention among them, in every row of its own",
            *found.notes,
        ),
    )  # fmt: skip


def _model(found: _Measured, model: str, size: str, config: BenchConfig, progress: Progress) -> None:
    overrides = _overrides(model, config)
    program = {"model": model, "size": size, "overrides": overrides, "inner": config.inner, "seed": config.seed}
    progress.step(f"{model}: curves")
    rounds = config.rounds or (2 if config.quick else ROUNDS)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    answer, cut = memory_journal.run_watched(
        "optpass.bench.memory_ways:measure",
        program | {"ratios": _ratios(config), "fractions": _fractions(config), "rounds": rounds, "budget_s": budget_s},
        progress,
        f"{model}: curves",
        run=run_isolated,
        environ=ENVIRON | {"TORCHINDUCTOR_COMPILE_THREADS": str(os.cpu_count() or 1)},  # compiling is not timed here
        timeout_s=3600.0 + budget_s,
    )
    if cut:
        found.notes.append(f"{model}: the curves are what was found before this: {cut}")
    statics, ways = answer["statics"], answer["ways"]
    names = [memory_ways.pytorch(ratio) for ratio in _ratios(config)]
    found.rows += memory_judge.rows_of(model, ways, names, config.tolerance, config.seed)
    found.verdicts += memory_judge.judge(model, ways, names, statics, config.seed)
    progress.step(f"{model}: compile time", 1)
    top, low = (ways.get(name, {}) for name in (memory_ways.UNCONSTRAINED, memory_ways.FLOOR))
    if "peak" not in top or "budget" not in low:
        return
    half = statics + (top["peak"] + low["budget"]) // 2
    budgets = {memory_compile.INDUCTOR: None, memory_compile.BUDGETED: half}
    budgets[memory_compile.AT_FLOOR] = statics + low["budget"]
    samples = _compile(program, budgets, config, progress)
    rows = sample_rows(samples, tolerance=config.tolerance, seed=config.seed, group=f"{model}: compile")
    found.rows += rows
    found.verdicts.append(memory_judge.judge_compile(model, samples, config.seed))


def _compile(
    program: Mapping[str, Any], budgets: Mapping[str, int | None], config: BenchConfig, progress: Progress
) -> dict[str, list[float]]:
    """Interleaved samples of cold compiles, by whole rounds."""
    samples: dict[str, list[float]] = {name: [] for name in budgets}
    begun = time.monotonic()
    budget_s = config.budget_s if config.budget_s is not None else COMPILE_BUDGET_S
    for number, order in schedule(list(budgets), config.rounds or (1 if config.quick else COMPILE_ROUNDS), config.seed):
        if number and time.monotonic() - begun >= budget_s:
            break
        taken = {}
        for name in order:
            progress.step(f"{program['model']}: compile time, round {number + 1}, {name}")
            arguments = dict(program) | {"budget": budgets[name]}
            answer = run_isolated("optpass.bench.memory_compile:sample", arguments, environ=ENVIRON)
            taken[name] = answer["seconds"]
        for name, seconds in taken.items():
            samples[name].append(seconds)
    return samples


def _planning(found: _Measured, config: BenchConfig, progress: Progress) -> None:
    progress.step("planning", 1)
    measured = [
        run_isolated("optpass.bench.memory_compile:planning", {"layers": n, "seed": config.seed}, environ=ENVIRON)
        for n in (LAYERS[:1] if config.quick else LAYERS)
    ]
    for one in measured:
        group = f"planning for {one['nodes']:.0f} nodes"
        found.rows += sample_rows({"planning": [one["seconds"]]}, tolerance=config.tolerance, group=group)
    found.verdicts.append(memory_judge.judge_planning(measured))


def _ratios(config: BenchConfig) -> Sequence[float]:
    return (1.0, 0.5, 0.0) if config.quick else RATIOS


def _fractions(config: BenchConfig) -> Sequence[float]:
    return (0.5,) if config.quick else FRACTIONS


def _overrides(model: str, config: BenchConfig) -> dict[str, Any]:
    """Those of the wanted fields that the model has."""
    return known_settings(model, dict(OVERRIDES) | ({} if config.quick or config.size else dict(LARGER)))


def known_settings(model: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `wanted` that are fields of the model's configuration or inputs."""
    presets = import_module(f"optpass.models.{model}").SIZES.values()
    known = {f.name for preset in presets for part in (preset.config, preset.inputs) for f in fields(part)}
    return {name: value for name, value in wanted.items() if name in known}
