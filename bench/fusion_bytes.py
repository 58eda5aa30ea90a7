"""Claim: bytes after fusion, as the roofline predicts them, are those that Inductor's kernels touch.

Each model is compiled once with `backend="optpass"` and caches off. The roofline pass predicts the kernels from the
partitioned graphs; Inductor then schedules the same graphs, and its schedule is read (`optpass.backend.kernel_bytes`
says what is counted). Nothing is timed, so the figures are the same on a busy machine.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict

from optpass.bench.clocks import check_device
from optpass.bench.environment import environment
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row

GOAL = 0.10
CLAIM = f"Predicted bytes after fusion are within {GOAL:.0%} (median) of those that Inductor's kernels touch."

MODES = ("inference", "training")
QUICK = ("mlp", "gpt")


def run(config: BenchConfig, progress: Progress) -> Result:
    """Compare predicted and touched bytes over the models, by phase. The claim is judged by the median error."""
    from optpass import models

    check_device(config.device)
    chosen = config.models or (QUICK if config.quick else models.names())
    size = config.size or ("tiny" if config.quick else "small")
    place = environment(config.device)
    progress.start(len(chosen) * len(MODES))
    rows: list[Row] = []
    for name in chosen:
        for mode in MODES:
            progress.step(f"{name} {mode}")
            rows.extend(_rows(name, mode, measure(name, size, train=mode == "training", seed=config.seed)))
            progress.step(f"{name} {mode}", 1)
    errors = [abs(float(row.extra["error"])) for row in rows]
    middle = statistics.median(errors)
    return Result(
        name="fusion_bytes",
        claim=CLAIM,
        environment=place.finished(),
        config={**asdict(config), "models": list(chosen), "size": size},
        rows=tuple(rows),
        passed=middle <= GOAL,
        finding=f"median error {middle:.1%} (goal at most {GOAL:.0%}), largest {max(errors):.1%}, {len(rows)} graphs",
        notes=("Touched bytes are read off Inductor's schedule for this machine's CPU backend.",),
    )


def measure(name: str, size: str, *, train: bool, seed: int) -> dict[str, tuple[int, int, int, int]]:
    """By phase: (touched bytes, predicted bytes, kernels, predicted kernels) of one step of a model."""
    import torch

    from optpass import models
    from optpass.backend import compat, kernel_bytes
    from optpass.backend.reporting import reset_report
    from optpass.backend.session import SESSIONS

    compat.reset_dynamo()
    reset_report()
    torch.manual_seed(seed)
    module, inputs = models.build(name, size)
    module.train(train)
    with kernel_bytes.recorded() as kernels, torch.set_grad_enabled(train):
        output = torch.compile(module, backend="optpass")(*inputs)
        if train:
            models.loss(output).backward()  # type: ignore[no-untyped-call]
    groups = [g for s in SESSIONS.all() for g in s.product("roofline").groups]
    found = {}
    for phase in ("forward", "backward") if train else ("forward",):
        touched = [k.bytes for k in kernels if k.phase == phase]
        predicted = [g.reads + g.writes for g in groups if g.phase == phase]
        found[phase] = (sum(touched), sum(predicted), len(touched), len(predicted))
    return found


def _rows(name: str, mode: str, found: dict[str, tuple[int, int, int, int]]) -> list[Row]:
    return [
        Row(
            case=phase,
            group=f"{name} {mode}",
            unit="B",
            median=float(touched),
            extra={
                "predicted": float(predicted),
                "error": predicted / touched - 1,
                "kernels": float(kernels),
                "predicted kernels": float(groups),
            },
        )
        for phase, (touched, predicted, kernels, groups) in found.items()
    ]
