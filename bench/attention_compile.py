"""Claim: the attention pass takes less than `SHARE` of compile time, and its time grows linearly with the graph.

Share. A sample is a fresh process with empty Inductor and Triton caches that compiles one reference model for
Inductor, with `attention="always"` and dropout handed to the kernel, so that every site is rewritten in training too.
The share is the pass's seconds (`PassRecord.seconds`: with the copy taken before it and the check after it) over the
graph's (`t_compile_s`: all passes and Inductor, in training the backward's compile as well; without Dynamo). Nothing
is warmed up: both parts pay what the first compile of a process pays. A survey beforehand, without Inductor, says
which models have attention and how many nodes; the largest decides, by the 95% interval of its share in every mode. It
is compiled in as many rounds as an interval takes before any other model is.

Growth. In one process, a model of tiny width is captured by Dynamo with 2, 24 and 96 layers. Each sample runs the
backend on a fresh copy of one graph with `inner="eager"`: the same passes, and nothing compiled. What is held against
the goal is the pass's time per node with 96 layers over that with 24. Rounds take the depths in the order that
`harness.schedule` gives. Cycle collection is off within samples: how often it falls into one, and how long it takes,
follows from all that the process holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from optpass.bench.attention_compile_samples import ATTENTION, Sample
from optpass.bench.clocks import check_device
from optpass.bench.environment import environment
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, sample_rows
from optpass.bench.stats import Interval, median, median_interval

SHARE = 0.05
GROWTH = 1.5
CLAIM = (
    f"The attention pass takes less than {SHARE:.0%} of compile time, and per node at most {GROWTH} times as long with "
    "96 layers as with 24."
)

MODES = ("inference", "training")
#: Depths of the growth: the baseline first, the one that is judged last.
LAYERS = (24, 2, 96)
QUICK_LAYERS = (6, 2, 24)
#: What grows: a mask from a buffer, and one that is added as floats, with dropout and gradients.
PROGRAMS = (("gpt", "inference"), ("bert", "training"))
#: As many as an interval takes.
ROUNDS = 5
#: Wall seconds after which no compile begins that would not end in time.
BUDGET_S = 1140.0
_ENVIRON = {"OMP_NUM_THREADS": "1"}
_TOO_FEW = " (too few rounds for an interval)"


@dataclass
class Cell:
    """One model in one mode, and the samples of its compiles in order of the rounds."""

    model: str
    mode: str
    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """The pass's part of each compile, 0 to 1."""
        return tuple(one["pass_s"] / one["compile_s"] for one in self.samples)

    @property
    def bounds(self) -> Interval | None:
        """The interval of the share; None with too few rounds."""
        return median_interval(self.shares)


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure growth, then shares until the time is over, and judge both.

    Raises:
        ConfigError: an unknown model or size, or no such device.
        BenchError: a model failed to compile, or the pass failed on it; the line names it.
    """
    check_device(config.device)
    models, size = _chosen(config)
    layers = QUICK_LAYERS if config.quick else LAYERS
    programs = PROGRAMS[:1] if config.quick else PROGRAMS
    rounds = config.rounds or (2 if config.quick else ROUNDS)
    begun = time.monotonic()
    before = environment(config.device)
    progress.start(1 + len(programs) + len(models) * len(MODES))
    shared = {"device": config.device, "seed": config.seed}

    progress.step("survey")
    survey = _child("survey", {"models": models, "size": size} | shared)
    growth: list[Row] = []
    for model, mode in programs:
        progress.step(f"{model} {mode}, {', '.join(map(str, sorted(layers)))} layers", 1)
        found = _child("grow", {"model": model, "mode": mode, "layers": layers, "rounds": rounds} | shared)
        growth += _growth_rows(f"{model} {mode}", layers, found, config)
    cells = _cells(survey, MODES[:1] if config.quick else MODES)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    _compile(cells, 1 if config.quick else rounds, begun + budget_s, {"size": size} | shared, progress)

    passed, finding = _judge(cells, growth, f"{max(layers)} layers", decisive=config.full)
    return Result(
        name="attention_compile",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config)
        | {"models": models, "size": size, "rounds": rounds, "budget_s": budget_s, "layers": sorted(layers)}
        | {"goals": {"share": SHARE, "growth": GROWTH}, "attention": ATTENTION, "environ": _ENVIRON},
        rows=(*_share_rows(cells, survey), *growth),
        passed=passed,
        finding=finding,
        notes=tuple(_notes(cells, survey)),
    )


def _child(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return run_isolated(f"optpass.bench.attention_compile_samples:{function}", arguments, environ=_ENVIRON)


def _chosen(config: BenchConfig) -> tuple[tuple[str, ...], str]:
    """Models to survey and their size, checked before anything runs for minutes."""
    from optpass import models
    from optpass.errors import ConfigError, did_you_mean

    chosen = config.models or (models.names()[:1] if config.quick else models.names())
    size = config.size or ("tiny" if config.quick else "small")
    for name in chosen:
        if size not in models.sizes(name):  # raises for an unknown name
            raise ConfigError(f"model {name!r} has no size {size!r}; {did_you_mean(size, models.sizes(name))}")
    return tuple(chosen), size


def _cells(survey: Mapping[str, Mapping[str, int]], modes: Sequence[str]) -> list[Cell]:
    """The largest model in every mode, then the others, largest first, mode by mode: what time runs out on is last."""
    having = sorted((name for name in survey if survey[name]["sites"]), key=lambda name: -survey[name]["nodes"])
    first = [Cell(name, mode) for name in having[:1] for mode in modes]
    return first + [Cell(name, mode) for mode in modes for name in having[1:]]


def _compile(
    cells: Sequence[Cell], rounds: int, until: float, arguments: Mapping[str, Any], progress: Progress
) -> None:
    """Fill the cells: the largest model's, round by round, then each other once, then these in further rounds.

    But for the largest model's first round, a sample begins only where it should end in time. A cell is expected to
    take as long as it did before; one that was not measured, as long as the longest of its mode.
    """
    largest = [cell for cell in cells if cell.model == cells[0].model]
    others = [cell for cell in cells if cell not in largest]
    for number, part in [*((n, largest) for n in range(rounds)), *((n, others) for n in range(rounds))]:
        for cell in part:
            like = [one.wall_s for one in cells if one.mode == cell.mode and one.samples]
            expected = cell.wall_s or max(like, default=0.0)
            if (number or part is others) and time.monotonic() + expected > until:
                continue
            progress.step(f"{cell.model} {cell.mode}, round {number + 1}", 1 if not number else 0)
            start = time.monotonic()
            cell.samples.append(_child("share", {"model": cell.model, "mode": cell.mode} | dict(arguments)))
            cell.wall_s = time.monotonic() - start


def _share_rows(cells: Sequence[Cell], survey: Mapping[str, Mapping[str, int]]) -> Iterator[Row]:
    for cell in cells:
        if not cell.samples:
            continue
        group = f"{cell.model}, {survey[cell.model]['nodes']} nodes"
        percent = {cell.mode: [100 * one for one in cell.shares]}
        (row,) = sample_rows(percent, tolerance=0.0, group=group, unit="%")
        extra: dict[str, float | str] = {
            "pass ms": 1e3 * median([one["pass_s"] for one in cell.samples]),
            "compile s": median([one["compile_s"] for one in cell.samples]),
            "fused": cell.samples[0]["fused"],
            "declined": cell.samples[0]["declined"],
        }
        yield row.model_copy(update={"extra": extra})


def _growth_rows(
    group: str, layers: Sequence[int], found: Mapping[str, Sequence[Sample]], config: BenchConfig
) -> Iterator[Row]:
    """Microseconds per node at each depth, against the first depth's."""
    taken = {f"{depth} layers": found[str(depth)] for depth in layers}
    per_node = {case: [1e6 * one["pass_s"] / one["nodes"] for one in samples] for case, samples in taken.items()}
    for row in sample_rows(per_node, tolerance=config.tolerance, seed=config.seed, group=group, unit="us/node"):
        samples = taken[row.case]
        extra: dict[str, float | str] = {"nodes": samples[0]["nodes"]}
        extra |= {"pass ms": 1e3 * median([one["pass_s"] for one in samples])}
        extra |= {"fused": samples[0]["fused"], "declined": samples[0]["declined"]}
        yield row.model_copy(update={"extra": extra})


def _judge(cells: Sequence[Cell], growth: Sequence[Row], deepest: str, *, decisive: bool) -> tuple[bool | None, str]:
    """Both parts by their intervals; every mode of the largest model must have been measured, and every depth."""
    largest = [cell for cell in cells if cell.model == cells[0].model] if cells else []
    parts = [_within(cell.bounds, SHARE) for cell in largest] or [None]
    texts = [
        f"{cell.model} {cell.mode} {median(cell.shares):.2%} of compile time{_percent(cell.bounds)}, goal {SHARE:.0%}"
        for cell in largest
        if cell.samples
    ]
    for row in growth:
        if row.case != deepest:
            continue
        parts.append(_within(Interval(*row.ratio_ci) if row.ratio_ci else None, GROWTH))
        bounds = f" [{row.ratio_ci[0]:.2f}, {row.ratio_ci[1]:.2f}]" if row.ratio_ci else _TOO_FEW
        texts.append(f"{row.group} per node {row.ratio:.2f} times{bounds}, goal {GROWTH}")
    text = "; ".join(texts)
    if False in parts:
        return False, text
    return (True if decisive and None not in parts else None), text


def _percent(bounds: Interval | None) -> str:
    return f" [{bounds.low:.2%}, {bounds.high:.2%}]" if bounds else _TOO_FEW


def _within(bounds: Interval | None, goal: float) -> bool | None:
    if bounds is None:
        return None
    return True if bounds.high <= goal else False if bounds.low > goal else None


def _notes(cells: Sequence[Cell], survey: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield "share: the pass with its copy and check, over all passes and Inductor (no Dynamo); fresh process, no caches"
    yield "growth: tiny width, inner='eager', the same captured graph in every round, no cycle collection in samples"
    if without := [name for name, found in survey.items() if not found["sites"]]:
        yield f"without attention: {', '.join(without)}"
    if missing := [f"{cell.model} {cell.mode}" for cell in cells if not cell.samples]:
        yield f"not measured, time ran out: {', '.join(missing)}"
