"""Claim: predicted step times are within `GOAL` of measured ones, averaged over models, in inference and in training.

The processor is calibrated first (or its cached calibration is used). Every model is captured ahead of time and priced
before anything is measured, so that no measurement can leak into a prediction. Then each is compiled with plain
Inductor and timed: inference under `no_grad`, training as forward, loss and backward without an optimizer, gradients
dropped after each step. The verdict is on the mean of |predicted / measured - 1| over models and modes, with a
bootstrap interval over the samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from optpass.bench.clocks import Call, check_device
from optpass.bench.environment import environment
from optpass.bench.harness import Case, compare
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, sample_rows
from optpass.bench.stats import CONFIDENCE, MIN_ROUNDS, RESAMPLES, Interval, median

if TYPE_CHECKING:
    from optpass.passes.devices import DeviceSpec

GOAL = 0.25
CLAIM = f"Predicted step times are within {GOAL:.0%} of measured ones, on average over models and modes."

ROUNDS = 20
BUDGET_S = 1800.0
MODES = ("inference", "training")
SUMMARY = "all, mean absolute error"


@dataclass
class Cell:
    """One model in one mode: seconds predicted, and samples of seconds measured."""

    model: str
    mode: str
    predicted_s: float
    samples: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / median(self.samples) - 1


def run(config: BenchConfig, progress: Progress) -> Result:
    """Predict, then measure, then judge by the interval of the mean absolute error.

    Raises:
        ConfigError: an unknown model or size, or no such device.
        TraceError: a model could not be captured.
    """
    check_device(config.device)
    names, size = _chosen(config)
    rounds = config.rounds or (MIN_ROUNDS if config.quick else ROUNDS)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    before = environment(config.device)
    busy = _busy(config.device)
    progress.start(1 + 2 * len(names) * len(MODES))
    spec = _spec(config.device, progress)
    cells = [Cell(name, mode, _predicted(name, size, mode, config, spec, progress)) for name in names for mode in MODES]
    left_out = _measure(cells, size, rounds, budget_s, config, progress)
    measured = [cell for cell in cells if cell.samples]
    busy = busy or _busy(config.device)
    passed, summary, finding = _judge(measured, config.seed)
    return Result(
        name="roofline",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config)
        | {"models": names, "size": size, "rounds": rounds, "budget_s": budget_s, "modes": MODES, "goal": GOAL}
        | {"device_spec": spec.name, "device_fingerprint": spec.fingerprint()},
        rows=(*_rows(measured, config), *summary),
        passed=None if left_out or busy or not config.full else passed,
        finding=finding,
        notes=_notes(left_out, busy),
    )


def predicted_seconds(name: str, size: str, mode: str, device: str, spec: DeviceSpec) -> float:
    """Step time of a model on a device, from its graphs alone: nothing is allocated, compiled or run."""
    import torch

    from optpass import models
    from optpass.backend import compat
    from optpass.backend.ahead import capture_model
    from optpass.passes.roofline.analysis import program_of
    from optpass.passes.roofline.price import price

    training = mode == "training"
    fake = compat.fake_mode_for_planning()
    with fake, torch.device(device):
        module, inputs = models.build(name, size)
        module.train(training)
    capture = capture_model(module, inputs, train=training, loss=models.loss if training else None, fake=fake)
    return sum(price(program_of(item.graphs), spec).totals.time_us for item in capture.items) * 1e-6


def step(name: str, size: str, mode: str, device: str, seed: int) -> Call:
    """One step of a compiled model, compiled and called once."""
    import torch

    from optpass import models

    torch.manual_seed(seed)
    training = mode == "training"
    with torch.device(device):
        module, inputs = models.build(name, size)
    module.train(training)
    if not training:
        compiled = torch.compile(module, dynamic=False)

        def infer() -> None:
            with torch.no_grad():
                compiled(*inputs)

        infer()
        return infer
    lossy = torch.compile(lambda *args: models.loss(module(*args)), dynamic=False)

    def train() -> None:
        torch.autograd.backward(lossy(*inputs))
        for parameter in module.parameters():
            parameter.grad = None

    train()
    return train


def _chosen(config: BenchConfig) -> tuple[tuple[str, ...], str]:
    """Models and size, checked before anything runs for minutes."""
    from optpass import models
    from optpass.errors import ConfigError, did_you_mean

    chosen = config.models or (("mlp", "gpt") if config.quick else models.names())
    size = config.size or ("tiny" if config.quick else "small")
    for name in chosen:
        if size not in models.sizes(name):  # raises for an unknown name
            raise ConfigError(f"model {name!r} has no size {size!r}; {did_you_mean(size, models.sizes(name))}")
    return tuple(chosen), size


def _spec(device: str, progress: Progress) -> DeviceSpec:
    """The device as it was measured, or for a GPU as its datasheet has it."""
    import torch

    from optpass.backend.device import actual
    from optpass.passes.roofline.calibration import calibrated_spec

    if device == "cuda":
        return actual(torch.device(device))
    progress.step("calibration")
    return calibrated_spec(lambda fraction, label: progress.step(f"calibration: {label}"))


def _predicted(name: str, size: str, mode: str, config: BenchConfig, spec: DeviceSpec, progress: Progress) -> float:
    progress.step(f"{name} {mode}: predicting", count=1)
    return predicted_seconds(name, size, mode, config.device, spec)


def _measure(
    cells: Sequence[Cell], size: str, rounds: int, budget_s: float, config: BenchConfig, progress: Progress
) -> list[str]:
    """Fill the cells in order; names of those that the time did not suffice for."""
    import time

    import torch

    begun = time.monotonic()
    for number, cell in enumerate(cells):
        if number and time.monotonic() - begun >= budget_s:
            return [f"{late.model} {late.mode}" for late in cells[number:]]
        progress.step(f"{cell.model} {cell.mode}: measuring", count=1)
        # Every cell starts as a fresh process would: no graph of another, and no recompile limit reached.
        torch.compiler.reset()

        def make(cell: Cell = cell) -> Call:
            return step(cell.model, size, cell.mode, config.device, config.seed)

        case = Case(f"{cell.model} {cell.mode}", make)
        found = compare([case], rounds=rounds, budget_s=math.inf, device=config.device, seed=config.seed)
        cell.samples = found.samples[case.name]
    return []


def _rows(cells: Sequence[Cell], config: BenchConfig) -> list[Row]:
    rows = []
    for cell in cells:
        (row,) = sample_rows(
            {"measured": cell.samples}, tolerance=config.tolerance, seed=config.seed, group=f"{cell.model} {cell.mode}"
        )
        figures: dict[str, float | str] = {"predicted ms": cell.predicted_s * 1e3, "error %": cell.error * 100}
        rows.append(row.model_copy(update={"extra": figures}))
    return rows


def _judge(cells: Sequence[Cell], seed: int) -> tuple[bool | None, list[Row], str]:
    """True when the interval's upper bound is within the goal, False when its lower bound is beyond, else None."""
    if not cells:
        return None, [], "nothing was measured"
    value, interval = mean_error(cells, seed)
    row = Row(
        case="predicted against measured", group=SUMMARY, unit="%", median=value * 100,
        ci_low=interval.low * 100 if interval else None, ci_high=interval.high * 100 if interval else None,
    )  # fmt: skip
    text = f"mean absolute error {value:.1%}"
    if interval is None:
        return None, [row], f"{text}, too few rounds for an interval; goal {GOAL:.0%}"
    text += f" [{interval.low:.1%}, {interval.high:.1%}], goal at most {GOAL:.0%} by the upper bound"
    return (True if interval.high <= GOAL else False if interval.low > GOAL else None), [row], text


def mean_error(cells: Sequence[Cell], seed: int) -> tuple[float, Interval | None]:
    """The mean over cells of |predicted / median measured - 1|, and its bootstrap interval.

    The set of models is taken as fixed: the interval speaks of the noise of measuring them. None where a cell has
    fewer than `MIN_ROUNDS` samples.
    """
    import numpy as np

    value = sum(abs(cell.error) for cell in cells) / len(cells)
    if min(len(cell.samples) for cell in cells) < MIN_ROUNDS:
        return value, None
    rng = np.random.default_rng(seed)
    total: Any = np.zeros(RESAMPLES)
    for cell in cells:
        samples = np.asarray(cell.samples)
        drawn = samples[rng.integers(0, len(samples), size=(RESAMPLES, len(samples)))]
        total += np.abs(cell.predicted_s / np.median(drawn, axis=1) - 1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(total / len(cells), [tail, 1 - tail])
    return value, Interval(float(low), float(high))


def _busy(device: str) -> bool:
    """Whether other processes make parallel loops stall, so that no step time means anything."""
    from optpass.passes.roofline.calibration_probes import contended

    return device == "cpu" and contended()


def _notes(left_out: Sequence[str], busy: bool) -> tuple[str, ...]:
    notes = [
        "predictions come from captured graphs and a calibration of the device, made before anything is measured",
        "inference under no_grad; training is forward, loss and backward, without an optimizer",
    ]
    if busy:
        notes.append("other processes kept the processor busy: parallel loops stalled, the times mean nothing")
    return (*notes, *([f"not measured, time ran out: {', '.join(left_out)}"] if left_out else []))
