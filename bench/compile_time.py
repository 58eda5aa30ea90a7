"""Claim: compiling with `backend="optpass"` costs at most `GOAL` times the processor time of plain Inductor.

How one sample is taken (`sample`, in a fresh process with empty Inductor and Triton caches): import torch; compile and
run one tiny function with the same backend, which pays for what happens once in a process (imports, instruction-set
checks, pattern tables) and is reported apart as "first use"; build the model; then the processor time of the first
call of the compiled model, forward and, in training, loss and backward: this process's and its children's (the C++
compiler). `TORCHINDUCTOR_COMPILE_THREADS=1` keeps compilers children of the measuring process, so that their time is
attributed; `OMP_NUM_THREADS=1` keeps idle threads from spinning into the figure. The one execution of the model that
the first call contains is in the figure; at the default size it is a small part of it.

A round takes, for each model and mode, one sample of each of three cases in the order that `harness.schedule` gives:
Inductor, optpass, and Inductor once more, whose ratio to the first shows the noise (its true value is 1).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from optpass.bench.clocks import check_device, cpu_seconds
from optpass.bench.environment import environment
from optpass.bench.harness import schedule
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, mean_row, sample_rows
from optpass.bench.stats import Interval, median

GOAL = 1.05
CLAIM = f'Compiling with backend="optpass" takes at most {GOAL} times the processor time of plain Inductor.'

ROUNDS = 5
BUDGET_S = 3600.0
MODES = ("inference", "training")
#: Case name and backend, the baseline first.
CASES = {"inductor": "inductor", "optpass": "optpass", "inductor again": "inductor"}
SUMMARY = "all, geometric mean"
_ENVIRON = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

Sample = dict[str, float]


@dataclass
class Cell:
    """One model in one mode, and what was measured of it: per case, samples in order of the rounds."""

    model: str
    mode: str
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {case: [] for case in CASES})

    def seconds(self, case: str, *parts: str) -> tuple[float, ...]:
        """The sum of the named parts of each sample of a case."""
        return tuple(sum(taken[part] for part in parts) for taken in self.samples[case])


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure compile time over the models and judge the claim by the interval of the geometric mean.

    Raises:
        ConfigError: an unknown model or size, or no such device.
        BenchError: a model failed to compile; the line names it.
    """
    check_device(config.device)
    models, size = _chosen(config)
    modes = MODES[:1] if config.quick else MODES
    rounds = config.rounds or (1 if config.quick else ROUNDS)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    cells = [Cell(model, mode) for model in models for mode in modes]
    before = environment(config.device)
    _measure(cells, config, size, rounds, budget_s, progress)
    measured = [cell for cell in cells if cell.samples["inductor"]]
    rows = _rows(measured, config)
    passed, finding = _judge(rows, complete=len(measured) == len(cells))
    return Result(
        name="compile_time",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config)
        | {"models": models, "size": size, "rounds": rounds, "budget_s": budget_s, "modes": modes, "goal": GOAL}
        | {"environ": _ENVIRON},
        rows=tuple(rows),
        passed=passed,
        finding=finding,
        notes=_notes(cells, measured),
    )


def sample(model: str, size: str, mode: str, backend: str, device: str, seed: int) -> Sample:
    """One sample, in this process, which must be fresh: processor seconds of the first call, and of first use.

    `own_s` and `children_s` are the first call's, `wall_s` is its elapsed time; `first_use_s` is the processor time
    of compiling and running the tiny function before it.
    """
    import torch

    from optpass import models

    torch.manual_seed(seed)
    training = mode == "training"
    start = sum(cpu_seconds())
    _first_use(backend, device, training)
    first_use = sum(cpu_seconds()) - start
    module, inputs = models.build(model, size)
    module, inputs = module.to(device).train(training), _moved(inputs, device)
    compiled = torch.compile(module, backend=backend)
    wall = time.perf_counter()
    own, children = cpu_seconds()
    if training:
        torch.autograd.backward(models.loss(compiled(*inputs)))
    else:
        with torch.no_grad():
            compiled(*inputs)
    own_after, children_after = cpu_seconds()
    return {
        "own_s": own_after - own,
        "children_s": children_after - children,
        "first_use_s": first_use,
        "wall_s": time.perf_counter() - wall,
    }


def _first_use(backend: str, device: str, training: bool) -> None:
    """Compile and run something tiny in the same mode, so that what is paid once in a process has been paid."""
    import torch

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1).sin() + 1

    x = torch.randn(3, 3, device=device, requires_grad=training)
    with torch.set_grad_enabled(training):
        out = torch.compile(tiny, backend=backend)(x)
    if training:
        torch.autograd.backward(out.sum())


def _moved(value: Any, device: str) -> Any:
    """Example inputs, nested or not, on a device."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value


def _chosen(config: BenchConfig) -> tuple[tuple[str, ...], str]:
    """Models and size, checked before anything runs for minutes."""
    from optpass import models
    from optpass.errors import ConfigError, did_you_mean

    chosen = config.models or (models.names()[:2] if config.quick else models.names())
    size = config.size or ("tiny" if config.quick else "small")
    for name in chosen:
        if size not in models.sizes(name):  # raises for an unknown name
            raise ConfigError(f"model {name!r} has no size {size!r}; {did_you_mean(size, models.sizes(name))}")
    return tuple(chosen), size


def _measure(
    cells: Sequence[Cell], config: BenchConfig, size: str, rounds: int, budget_s: float, progress: Progress
) -> None:
    """Fill the cells, until the rounds are done, the geometric mean's interval is narrow, or the time is over.

    The first round ends early when the time is over; a later one begins only where it is expected to end in time, so
    that every cell has as many rounds as the others.
    """
    begun = time.monotonic()
    progress.start(rounds * len(cells) * len(CASES))
    done = 0
    for number, order in schedule(list(CASES), rounds, config.seed):
        if number and (time.monotonic() - begun) * (number + 1) / number > budget_s:
            return
        for cell in cells:
            if done and not number and time.monotonic() - begun >= budget_s:
                return
            taken: dict[str, Sample] = {}
            for case in order:
                progress.step(f"{cell.model} {cell.mode}: {case}", count=1 if done else 0)
                taken[case] = run_isolated(
                    "optpass.bench.compile_time:sample",
                    {"model": cell.model, "size": size, "mode": cell.mode, "backend": CASES[case]}
                    | {"device": config.device, "seed": config.seed},
                    environ=_ENVIRON,
                )
                done += 1
            for case, one in taken.items():
                cell.samples[case].append(one)
        mean = _mean("optpass", "optpass", cells, config, "own_s", "children_s")
        if mean.ratio_ci and Interval(*mean.ratio_ci).half_width <= config.tolerance / 2:
            return


def _rows(cells: Sequence[Cell], config: BenchConfig) -> list[Row]:
    """Every cell's cases, then the geometric means: what the claim is judged by, the noise, and the parts."""
    rows: list[Row] = []
    for cell in cells:
        totals = {case: cell.seconds(case, "own_s", "children_s") for case in CASES}
        group = f"{cell.model} {cell.mode}"
        for row in sample_rows(totals, tolerance=config.tolerance, seed=config.seed, group=group):
            extra = {
                "own s": median(cell.seconds(row.case, "own_s")),
                "wall s": median(cell.seconds(row.case, "wall_s")),
            }
            rows.append(row.model_copy(update={"extra": extra}))
    rows.append(_mean("optpass", "optpass", cells, config, "own_s", "children_s"))
    rows.append(_mean("inductor again", "inductor again (noise)", cells, config, "own_s", "children_s"))
    rows.append(_mean("optpass", "optpass, without child processes", cells, config, "own_s"))
    rows.append(_mean("optpass", "optpass, first use in a process", cells, config, "first_use_s"))
    return rows


def _mean(case: str, label: str, cells: Sequence[Cell], config: BenchConfig, *parts: str) -> Row:
    pairs = [(cell.seconds("inductor", *parts), cell.seconds(case, *parts)) for cell in cells]
    return mean_row(label, pairs, tolerance=config.tolerance, seed=config.seed, group=SUMMARY)


def _judge(rows: Sequence[Row], *, complete: bool) -> tuple[bool | None, str]:
    """True when the interval's upper bound is within the goal, False when its lower bound is beyond, else None."""
    mean = next(row for row in rows if row.group == SUMMARY and row.case == "optpass")
    programs = len({row.group for row in rows} - {SUMMARY})
    text = f"geometric mean of the ratios ({programs} measured) {mean.ratio:.3f}"
    if mean.ratio_ci is None:
        return None, f"{text}, too few rounds for an interval; goal {GOAL}"
    low, high = mean.ratio_ci
    text += f" [{low:.3f}, {high:.3f}], goal at most {GOAL} by the upper bound"
    if not complete:
        return None, f"{text}; time ran out before every model was measured"
    return (True if high <= GOAL else False if low > GOAL else None), text


def _notes(cells: Sequence[Cell], measured: Sequence[Cell]) -> tuple[str, ...]:
    left_out = [f"{cell.model} {cell.mode}" for cell in cells if cell not in measured]
    notes = [
        "processor time of the compiling process and its compilers, one compile thread, empty caches, imports excluded",
        "'own' is the compiling process without its children; 'first use' is what a process pays once, before this",
    ]
    return (*notes, *([f"not measured, time ran out: {', '.join(left_out)}"] if left_out else []))
