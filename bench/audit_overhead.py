"""Claim: an audit costs at most 3% of compile CPU time with an eager inner, 1% under Inductor, and 1% of steady calls.

One process per program and part, so that nothing one program left behind is in another's figure; inside it the cases
alternate in the order that `harness.schedule` gives: plain, audited (a `Recording` as `optpass.audit()` makes it), and
plain once more, whose ratio to the first shows the noise (its true value is 1). Each part has a share of the budget,
each program an equal share of what its part has left.

Compiling: before each sample Dynamo is reset and garbage collected; a sample is the processor time of this process
from `torch.compile` to the end of the first call (training: with the backward). Inductor's and AOTAutograd's caches of
graphs are off; the C++ that is written is compiled once, before the first sample: the compiler's own time would only
dilute the ratio, which is therefore an upper bound of what a user sees. The recording is made before, and read after,
a sample. The claim under Inductor is put to three programs, since each sample of it takes seconds.

Steady: the program is compiled once; a sample is wall time per call over some hundred milliseconds of calls.
The row "smallest program" is one addition, for the cost in nanoseconds; the claim is not about it.

All samples are taken with room on the interpreter's stack (`backend.compat.stack`): without it, how deep the caller
stands decides whether CPython maps memory thousands of times in one compile, and a frame more or less, as the audit
adds them, changes processor time by up to a fourth, either way. That says nothing of the audit, which makes that room
for every compile it watches; the gain is left out here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from optpass.bench.audit_overhead_samples import CASES, MODES, SMALLEST, Samples
from optpass.bench.clocks import check_device
from optpass.bench.environment import environment
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, mean_row, sample_rows
from optpass.bench.stats import median

STEADY = "steady calls"


class Part(NamedTuple):
    """What is measured: a function of `audit_overhead_samples`, a backend, the programs by default (() is all of them).

    Attributes:
        goal: the most that the audited case may take of the plain one.
        share: of the budget.
        more: programs that are told and not judged.
    """

    backend: str
    kind: str
    goal: float
    share: float
    models: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


_FEW = ("mlp", "dlrm", "gpt")
PARTS = {
    "compile, eager inner": Part("eager", "compiling", 1.03, 0.2),
    STEADY: Part("inductor", "steady", 1.01, 0.2, _FEW, (SMALLEST,)),
    "compile, Inductor": Part("inductor", "compiling", 1.01, 0.6, _FEW),
}
CLAIM = "An audit adds at most 3% to compile CPU time with an eager inner, 1% under Inductor, and 1% to steady calls."

#: At most; fewer where a program's share of the time is used up before.
ROUNDS = 24
#: Sizes of the models: small ones, where the programs' own work would only hide the audit's.
SIZES = {"compiling": "tiny", "steady": "tiny"}
#: A sample of the largest program under Inductor takes three seconds, and a bound of 1% some twenty of them.
BUDGET_S = 900.0
_ENVIRON = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Not `force_disable_caches`: with it, the C++ is compiled again for every sample.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
}
_SUMMARY = "all, geometric mean"


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the parts over the models and judge each by the interval of its geometric mean.

    Raises:
        ConfigError: an unknown model or size, or no such device.
        BenchError: a model failed to compile; the line names it.
    """
    check_device(config.device)
    chosen = _chosen(config)
    modes = MODES[:1] if config.quick else MODES
    rounds = config.rounds or (4 if config.quick else ROUNDS)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    before = environment(config.device)
    programs = [(part, model) for part, models in chosen.items() for model in (*models, *PARTS[part].more)]
    cells = [(part, model, mode) for part, model in programs for mode in (modes if model != SMALLEST else MODES[:1])]
    begun = time.monotonic()
    progress.start(len(programs))
    measured: dict[tuple[str, str, str], Samples] = {}
    for index, (part, model) in enumerate(programs):
        left = _seconds(part, [p for p, _ in programs[index:]], begun, budget_s)
        if measured and time.monotonic() - begun >= budget_s:
            break
        progress.step(f"{part}: {model}", count=1 if measured else 0)
        backend, kind, *_ = PARTS[part]
        taken = run_isolated(
            f"optpass.bench.audit_overhead_samples:{kind}",
            {"model": model, "size": config.size or SIZES[kind], "backend": backend, "rounds": rounds, "seconds": left}
            | {"modes": modes if model != SMALLEST else MODES[:1], "device": config.device, "seed": config.seed},
            environ=_ENVIRON,
        )
        measured |= {(part, model, mode): samples for mode, samples in taken.items()}
    rows = _rows(measured, config)
    passed, finding = _judge(rows, complete=len(measured) == len(cells))
    return Result(
        name="audit_overhead",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config)
        | {
            "models": chosen,
            "sizes": SIZES if config.size is None else config.size,
            "rounds": rounds,
            "budget_s": budget_s,
            "modes": modes,
        }
        | {"goals": {part: known.goal for part, known in PARTS.items()}, "environ": _ENVIRON},
        rows=tuple(rows),
        passed=passed,
        finding=finding,
        notes=_notes(cells, list(measured)),
    )


def _seconds(part: str, left: Sequence[str], begun: float, budget_s: float) -> float:
    """Time for the next program of a part, of those that are left: what the part has, shared equally."""
    names = list(PARTS)
    end = begun + budget_s * sum(PARTS[name].share for name in names[: names.index(part) + 1])
    return max(0.0, end - time.monotonic()) / max(1, list(left).count(part))


def _chosen(config: BenchConfig) -> dict[str, tuple[str, ...]]:
    """Models of each part, checked with their sizes before anything runs for minutes."""
    from optpass import models
    from optpass.errors import ConfigError, did_you_mean

    chosen = {}
    for part, known in PARTS.items():
        chosen[part] = config.models or (("mlp",) if config.quick else known.models or tuple(models.names()))
        size = config.size or SIZES[known.kind]
        for name in chosen[part]:
            if size not in models.sizes(name):  # raises for an unknown name
                raise ConfigError(f"model {name!r} has no size {size!r}; {did_you_mean(size, models.sizes(name))}")
    return chosen


def _rows(measured: dict[tuple[str, str, str], Samples], config: BenchConfig) -> list[Row]:
    """Every cell's cases, then for each part the geometric means: what it is judged by, and the noise."""
    rows: list[Row] = []
    for (part, model, mode), samples in measured.items():
        values = {case: tuple(samples[case]) for case in CASES}
        rows += sample_rows(values, tolerance=config.tolerance, seed=config.seed, group=f"{part}: {model} {mode}")
    for part in PARTS:
        cells = [samples for (p, model, _), samples in measured.items() if p == part and model != SMALLEST]
        for case in CASES[1:]:
            if cells:
                pairs = [(tuple(s["plain"]), tuple(s[case])) for s in cells]
                label = f"{part}: {case}" + (" (noise)" if case == "plain again" else "")
                rows.append(mean_row(label, pairs, tolerance=config.tolerance, seed=config.seed, group=_SUMMARY))
    smallest = measured.get((STEADY, SMALLEST, MODES[0]))
    if smallest is not None:
        added = (median(smallest["audited"]) - median(smallest["plain"])) * 1e9
        index = next(i for i, row in enumerate(rows) if row.group == _SUMMARY and row.case == f"{STEADY}: audited")
        rows[index] = rows[index].model_copy(update={"extra": {"smallest program, ns added": added}})
    return rows


def _judge(rows: Sequence[Row], *, complete: bool) -> tuple[bool | None, str]:
    """True when every part's upper bound is within its goal, False when a lower bound is beyond, else None."""
    verdicts: list[bool | None] = []
    texts = []
    for part, known in PARTS.items():
        goal = known.goal
        mean = next((row for row in rows if row.group == _SUMMARY and row.case == f"{part}: audited"), None)
        if mean is None or mean.ratio is None:
            verdicts.append(None)
            continue
        text = f"{part} {mean.ratio:.3f}"
        if mean.ratio_ci is None:
            verdicts.append(None)
        else:
            low, high = mean.ratio_ci
            text += f" [{low:.3f}, {high:.3f}]"
            verdicts.append(True if high <= goal else False if low > goal else None)
        texts.append(f"{text} (goal at most {goal})")
    finding = "; ".join(texts)
    if not complete:
        return None, f"{finding}; time ran out before everything was measured"
    if False in verdicts:
        return False, finding
    return (None if None in verdicts else True), finding


def _notes(cells: Sequence[tuple[str, str, str]], measured: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    left_out = [" ".join(cell) for cell in cells if cell not in measured]
    notes = [
        "processor time of compiling, in one process per program, cases interleaved; the C++ compiler left out",
        "all cases with room on the interpreter's stack, which an audit makes for each compile: that gain is left out",
    ]
    return (*notes, *([f"not measured, time ran out: {', '.join(left_out)}"] if left_out else []))
