"""Claim: a memory budget does in every model what it says, at ten budgets from the floor to the unconstrained peak.

One process for each cell: a model of `optpass.models` in training, with dropout where it has any; under aot_eager and
under Inductor; the loss in the graph and outside of it; one micro-batch, and several whose gradients add up in front of
an optimizer. What is run and measured is `memory_models_cell`'s, verdicts are `memory_models_judge`'s. What budgets
cost in time beside other ways is `memory`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optpass import models
from optpass.bench import memory_journal, memory_models_judge
from optpass.bench.clocks import check_device
from optpass.bench.environment import environment
from optpass.bench.isolate import run_isolated
from optpass.bench.memory import ENVIRON, known_settings
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, Row

CLAIM = (
    "At ten budgets from the floor to the unconstrained peak each model's training step stays within its budget, uses "
    "95% of it, needs what was predicted within 0.5%, and gives the gradients and the random state of the "
    "unconstrained step; a larger budget never has a smaller peak or a slower step, and less than the floor is refused."
)
BUDGETS, QUICK_BUDGETS = 10, 2
MICRO, OPTIMIZER = 3, "adamw"
INNERS = ("aot_eager", "inductor")
#: Overrides of a model's size: dropout, the loss in the model where it can be, and activations that matter.
OVERRIDES: Mapping[str, Any] = {"targets": True, "dropout": 0.1, "layers": 2, "batch": 4}
#: Of models that are nothing but linear layers, whose parameters outweigh what a small batch keeps.
OF_MODEL: Mapping[str, Mapping[str, Any]] = {"mlp": {"layers": 6, "width": 501, "batch": 2048}, "dlrm": {"batch": 2048}}
#: Longest that one cell may take, seconds; what it had found by then counts.
TIMEOUT_S = 3600.0
_LATE = "the time was over"


@dataclass(frozen=True)
class Cell:
    """One process of the benchmark."""

    model: str
    inner: str
    outside: bool
    micro: int

    @property
    def name(self) -> str:
        """For rows and messages."""
        place = "outside" if self.outside else "inside"
        batches = "1 micro-batch" if self.micro == 1 else f"{self.micro} micro-batches, {OPTIMIZER}"
        return f"{self.model}, {self.inner}, loss {place}, {batches}"


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the cells, those under aot_eager first, and judge them.

    Raises:
        ConfigError: an unknown model or size, or no such device.
    """
    check_device(config.device)
    before = environment(config.device)
    cells = list(cells_of(config))
    progress.start(len(cells))
    budgets = QUICK_BUDGETS if config.quick else BUDGETS
    found: dict[str, tuple[dict[str, Any], str]] = {}
    notes: list[str] = []
    begun = time.monotonic()
    for cell in cells:
        late = config.budget_s is not None and time.monotonic() - begun > config.budget_s
        answer, why = ({}, _LATE) if late else measured(cell, config, budgets, progress)
        if why:
            notes.append(f"{'cut short' if 'top' in answer else 'not measured'}: {cell.name}: {why[:200]}")
        if "top" in answer:
            found[cell.name] = answer, cell.inner
        progress.step(cell.name, 1)
    rows: list[Row] = []
    for name, (answer, inner) in found.items():
        rows += memory_models_judge.rows_of(name, answer, inner, budgets)
    complete = config.full and not notes
    passed, finding = memory_models_judge.judge(found, budgets, complete=complete)
    return Result(
        name="memory_models",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config) | {"cells": len(cells), "budgets": budgets, "environ": ENVIRON}
        | {"overrides": {name: overrides(name, config) for name in _models(config)}},
        rows=(*(r for r in rows if r.group != "all"), *(r for r in rows if r.group == "all")),
        passed=passed,
        finding=finding,
        notes=(
            "peaks are of everything that a step allocates: parameters, optimizer state and inputs too",
            "'predicted' is the error of the plan's peak; 'first' that of the step before its loss had been seen",
            *notes,
        ),
    )  # fmt: skip


def cells_of(config: BenchConfig) -> Iterator[Cell]:
    """The cells that are asked for, the quickest first."""
    inners = INNERS if config.inner == "inductor" else (config.inner,)
    for inner in inners[:1] if config.quick else inners:
        for model in _models(config):
            for micro in (1, MICRO):
                for outside in (False, True):
                    yield Cell(model, inner, outside, micro)


def measured(cell: Cell, config: BenchConfig, budgets: int, progress: Progress) -> tuple[dict[str, Any], str]:
    """What was found of a cell, and why it is not whole."""
    arguments = {
        "model": cell.model, "size": config.size or "small", "overrides": overrides(cell.model, config),
        "inner": cell.inner, "outside": cell.outside, "micro": cell.micro,
        "optimizer": "none" if cell.micro == 1 else OPTIMIZER, "budgets": budgets, "seed": config.seed,
    }  # fmt: skip
    progress.step(cell.name)
    try:
        return memory_journal.run_watched(
            "optpass.bench.memory_models_cell:measure", arguments, progress, cell.name, run=run_isolated,
            environ=ENVIRON, timeout_s=TIMEOUT_S,
        )  # fmt: skip
    except BenchError as error:
        return {}, str(error)


def overrides(model: str, config: BenchConfig) -> dict[str, Any]:
    """Those of a model."""
    own = {} if config.quick or config.size else OF_MODEL.get(model, {})
    return known_settings(model, dict(OVERRIDES) | dict(own))


def _models(config: BenchConfig) -> tuple[str, ...]:
    return config.models or (("gpt",) if config.quick else models.names())
