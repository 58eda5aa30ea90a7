"""One run from a checked file to its reports: build, compile, train, compare, validate, write.

`prepare` makes every check that can be made before training; `execute` trains and writes the reports, partial ones
too. Nothing here prints: `execute` tells a callback of each step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optpass.api import report as finished_report
from optpass.backend.memory.measure import step_peak
from optpass.backend.reporting import build_report
from optpass.errors import OptPassError, deliberate, first_line
from optpass.options import Options
from optpass.passes.roofline import calibration
from optpass.plan_api import check_names
from optpass.reporting import store
from optpass.reporting.files import write_json
from optpass.reporting.plan.model import PlanReport
from optpass.reporting.writable import check_folder
from optpass.training import data, network, text
from optpass.training.config import Job
from optpass.training.errors import TrainError
from optpass.training.loop import StepEvent, loss_of, steady_seconds, train_steps, validation_loss
from optpass.training.outcome import MemoryOutcome, Outcome
from optpass.training.planned import sized

#: Kind of the site under which the backend says what it planned for a graph.
MEMORY_SITE = "memory budget"
#: Micro-batches of held-out text behind the validation loss.
VALIDATION_BATCHES = 8

#: Called after every step with the compiled run's event and, when comparing, eager's.
OnStep = Callable[[StepEvent, StepEvent | None], None]


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    job: Job
    compare: bool
    model: nn.Module
    batches: data.Batches
    corpus: dict[str, Any]
    folder: Path
    plan: PlanReport | None = None  #: what the step was planned to need, where there is a budget

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def prepare(
    job: Job, *, compare: bool = False, progress: Callable[[float | None, str], None] | None = None
) -> Prepared:
    """Read the text, plan the memory, build the model and check that the reports can be written; writes nothing.

    Args:
        job: the training file; a micro-batch that is to be found is found here.
        compare: train eager too.
        progress: told what is being done.

    Raises:
        ConfigError: anything that would stop the run later and can be known now.
        BudgetInfeasibleError: no plan of a step fits the budget.
    """
    check_names(job.options)
    found = text.read(job)
    job, plan = sized(job, progress, vocabulary=found.vocabulary)
    config, corpus = job.config, found.corpus
    batches = text.batches(job, found)
    model = network.build(job, found.vocabulary)
    folder = Path(config.out) / config.name
    check_folder(folder, job.said("out"))
    facts = {
        "source": corpus.source,
        "files": corpus.files,
        "bytes": len(corpus.text),
        "sha256": corpus.sha256,
        "vocabulary": found.vocabulary,
    }
    return Prepared(job, compare, model, batches, facts, folder, plan)


def backend_options(options: Options, *, compare: bool) -> dict[str, Any]:
    """The dict for `torch.compile(options=...)`: every layer is resolved, so nothing below it has a say again.

    When comparing, Inductor is told to draw random numbers as eager does: its own generator is faster and as good,
    but another stream, and dropout would make the losses differ from the first step on.
    """
    values = {key: getattr(options, key) for key in type(options).model_fields}
    if compare and options.inner == "inductor":
        values["inductor"] = {**options.inductor, "fallback_random": True}
    return values


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """`count` threads within an op, for eager and for what is compiled inside; 0 changes nothing."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def execute(prepared: Prepared, on_step: OnStep) -> Outcome:
    """Train, and write `report.json` and `report.html` in the run's folder, also when the run ends early.

    Raises:
        TrainError: the loss is not finite, or the model failed; the partial report is written.
        KeyboardInterrupt, BrokenPipeError: as they came; the partial report is written.
        ReportError: the report cannot be written.
    """
    outcome, config = Outcome(), prepared.job.config
    try:
        with _threads(config.threads):
            for event, other in _steps(prepared, outcome):
                outcome.steps.append(event)
                if other is not None:
                    outcome.eager.append(other)
                _tell(on_step, event, other)
            held_out = prepared.batches.validation(VALIDATION_BATCHES)
            outcome.validation_loss = validation_loss(prepared.model, held_out, config)
        outcome.status = "done"
    except KeyboardInterrupt as error:
        _end(prepared, outcome, "interrupted", str(error) or "stopped by the user")
        raise
    except BrokenPipeError:
        _end(prepared, outcome, "interrupted", "who read the progress left")
        raise
    except Exception as error:
        cause = _deliberate(error, len(outcome.steps) + 1)
        _end(prepared, outcome, "failed", str(cause))
        raise cause from error
    _write(prepared, outcome)
    return outcome


def _tell(on_step: OnStep, event: StepEvent, eager: StepEvent | None) -> None:
    """Show a step; that it cannot be shown is no failure of the step."""
    try:
        on_step(event, eager)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TrainError(f"after step {event.step}: its line cannot be written: {error.strerror}") from error


def calibrate(prepared: Prepared, progress: Callable[[float, str], None] | None = None) -> None:
    """Measure the processor that the run is on, so that its report has times: 10 to 20 s, once a machine."""
    with _threads(prepared.job.config.threads):
        if calibration.cached_spec() is None:
            calibration.calibrated_spec(progress)


def calibrated(prepared: Prepared) -> bool:
    """Whether the device that the run is on has been measured; what is not a CPU has its datasheet."""
    with _threads(prepared.job.config.threads):
        return prepared.job.config.device != "cpu" or calibration.cached_spec() is not None


def _steps(prepared: Prepared, outcome: Outcome) -> Iterator[tuple[StepEvent, StepEvent | None]]:
    job, model = prepared.job, prepared.model
    rival = copy.deepcopy(model) if prepared.compare else None
    options = backend_options(job.options, compare=prepared.compare)
    compiled = torch.compile(loss_of(model), backend="optpass", options=options)
    measure = None if prepared.plan is None else functools.partial(_measured, prepared, outcome)
    events = train_steps(compiled, model, prepared.batches, job.config, measure)
    if rival is None:
        for event in events:
            yield event, None
    else:
        yield from zip(events, train_steps(loss_of(rival), rival, prepared.batches, job.config), strict=True)


def _measured(
    prepared: Prepared, outcome: Outcome, step: Callable[[], float], optimizer: torch.optim.Optimizer
) -> float:
    """Run `step`, and keep its peak in `outcome`."""
    plan = prepared.plan
    assert plan is not None and plan.budget_bytes is not None  # who measures has a budget
    losses: list[float] = []
    peak = step_peak(
        prepared.model, lambda: losses.append(step()), optimizer, device=prepared.job.config.device,
        alone=not prepared.compare,
    )  # fmt: skip
    report = build_report()
    sites = [*report.sites(MEMORY_SITE), *report.declined(MEMORY_SITE)]
    predicted = max((int(s.cost.get("predicted_peak_bytes", 0)) for s in sites), default=0)
    outcome.memory = MemoryOutcome(plan.budget_bytes, predicted or plan.predicted_peak_bytes, peak.total)
    return losses[0]


def _deliberate(error: BaseException, step: int) -> OptPassError:
    """The error as one that the command line prints in a line."""
    said = f"step {step} failed: {type(error).__name__}: {first_line(error)}; --debug shows where"
    return deliberate(error) or TrainError(said)


def _end(prepared: Prepared, outcome: Outcome, status: str, error: str) -> None:
    outcome.status, outcome.error = status, error
    _write(prepared, outcome)


def summary(prepared: Prepared, outcome: Outcome) -> dict[str, Any]:
    """What goes into `report.training`: seconds and nats as the keys say, curves by step."""
    config = prepared.job.config
    steady = steady_seconds(outcome.steps)
    result: dict[str, Any] = {
        "status": outcome.status,
        "config": config.to_json(),
        "data": prepared.corpus,
        "parameters": prepared.parameters,
        "steps": [event.to_json() for event in outcome.steps],
        "t_first_s": outcome.steps[0].step_s if outcome.steps else None,
        "t_steady_s": steady,
        "tokens_per_s": config.tokens_per_step / steady if steady else None,
        "validation_loss": outcome.validation_loss,
    }
    if outcome.memory is not None:
        result["memory"] = outcome.memory.to_json()
    if outcome.error is not None:
        result["error"] = outcome.error
    if prepared.compare:
        worst = outcome.max_difference()
        result["eager_loss"] = [event.loss for event in outcome.eager]
        result["eager_t_steady_s"] = steady_seconds(outcome.eager)
        result["max_difference"], result["max_difference_step"] = worst if worst else (None, None)
        result["tolerance"] = config.compare_tolerance
        result["holds"] = outcome.holds(config.compare_tolerance)
    return result


def _write(prepared: Prepared, outcome: Outcome) -> None:
    from optpass.reporting.html import write_html  # Jinja2 is needed only now

    store.current().set_training(summary(prepared, outcome))
    outcome.report = finished_report(prepared.job.config.name)
    outcome.paths = (prepared.folder / "report.json", prepared.folder / "report.html")
    write_json(outcome.report, outcome.paths[0])
    write_html(outcome.report, outcome.paths[1])
