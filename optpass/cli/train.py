"""`optpass train`: reads the flags, shows a run's progress and result. The run itself is `optpass.training`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpass.cli import output
from optpass.cli.ending import Terminated, raised_signals
from optpass.cli.flags import Html, Json, OptionPairs, pairs, tell_shadowed
from optpass.cli.progress import calibrating
from optpass.errors import ConfigError, OptPassError, ReportError
from optpass.reporting.writable import check_targets

if TYPE_CHECKING:
    from rich.console import Console

    from optpass.training.config import Job, TrainingConfig
    from optpass.training.loop import StepEvent
    from optpass.training.outcome import Outcome
    from optpass.training.run import OnStep, Prepared

#: Exit code where a step needed more memory than its budget.
OVER_BUDGET = 3
#: Rows of each list of the plan that is printed before training.
_PLAN_ROWS = 5
#: Rows of the loss table that `--compare` prints; every step is in the report.
_ROWS = 12


def train(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="The training file, e.g. examples/gpt-demo.toml.")],
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Steps, instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed, instead of the file's.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="NAME", help="Device to train on, instead of the file's.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Folder for the run's folder, instead of the file's.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", metavar="eager", help="Train eager too, step by step; exit 1 if the losses differ too much."
        ),
    ] = None,
    option: OptionPairs = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Train a language model compiled with backend="optpass", and report what was compiled and what it cost."""
    if compare not in (None, "eager"):
        raise ConfigError(f"--compare {compare!r} is not known; write --compare eager")
    flags = {"steps": steps, "seed": seed, "device": device, "out": out}
    from optpass.training.config import load

    job = load(
        config,
        overrides={key: value for key, value in flags.items() if value is not None},
        option_pairs=pairs(option, "--option"),
    )
    tell_shadowed(job.options, pairs(option, "--option"))
    check_targets({"--json": json, "--html": html})
    console = output.console(stderr=json == output.STDOUT)
    with contextlib.ExitStack() as stack:
        if json == output.STDOUT:
            stack.enter_context(output.result_only())
        prepared = _prepared(console, job, compare=compare is not None)
        try:
            outcome = _executed(console, prepared)
        except ReportError:
            raise
        except (OptPassError, KeyboardInterrupt, BrokenPipeError) as error:
            stack.close()  # standard output takes the result again
            _ended(error, prepared, json, html)
            raise
    _finish(console, prepared, outcome, json, html)
    if outcome.memory is not None and not outcome.memory.fits:
        raise typer.Exit(OVER_BUDGET)
    if outcome.holds(prepared.job.config.compare_tolerance) is False:
        raise typer.Exit(1)


def _prepared(console: Console, job: Job, *, compare: bool) -> Prepared:
    """The run, checked and announced; the processor measured, where it never was."""
    with _waiting(console, "reading text, building the model"):
        from optpass.training.run import calibrate, calibrated, prepare

        prepared = prepare(job, compare=compare)
    if not calibrated(prepared):
        with calibrating() as told:
            calibrate(prepared, told)
    _announce(console, prepared)
    if prepared.plan is not None:
        from optpass.reporting.plan.terminal import render_plan

        render_plan(prepared.plan, console, top=_PLAN_ROWS)
        _say(console, "")
    return prepared


def _executed(console: Console, prepared: Prepared) -> Outcome:
    from optpass.training.run import execute

    with raised_signals(), _progress(console, prepared.job.config) as on_step:  # its micro-batch is a number by now
        return execute(prepared, on_step)


def _ended(error: BaseException, prepared: Prepared, json: str | None, html: str | None) -> None:
    """Say where the partial report is, and write it where it was asked for; a signal's exit code where one came."""
    from optpass.reporting.files import read_json

    reached = prepared.folder / "report.json"
    ended = "interrupted" if isinstance(error, (KeyboardInterrupt, BrokenPipeError)) else "stopped"
    typer.echo(f"{ended}; what the run reached is in {reached}", err=True)
    if json is not None or html is not None:
        for path in output.write_files(read_json(reached), json, html):
            typer.echo(f"wrote {path}", err=True)
    if isinstance(error, Terminated):
        typer.echo(f"optpass: error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


def _say(console: Console, text: str) -> None:
    """Text as it is; the terminal folds long lines, a pipe gets them whole."""
    console.print(text, soft_wrap=True)


@contextlib.contextmanager
def _waiting(console: Console, what: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(what + " ..."):
            yield
    else:
        yield


def _announce(console: Console, prepared: Prepared) -> None:
    config, corpus = prepared.job.config, prepared.corpus
    model = f"{config.model} {config.size}" if ":" not in config.model else config.model
    _say(
        console,
        f"{config.name}: {model}, {prepared.parameters:,} parameters, on {config.device}; {corpus['bytes']:,} bytes "
        f"of {corpus['source']} ({corpus['files']} files) by {config.tokenizer}; {config.steps} steps of "
        f"{config.tokens_per_step:,} tokens",
    )


@contextlib.contextmanager
def _progress(console: Console, config: TrainingConfig) -> Iterator[OnStep]:
    """A callback that shows each step: a bar on a terminal, a line every `log_every` steps elsewhere."""
    if not console.is_terminal:
        _say(console, "compiling on the first step ...")
        yield _plain(console, config)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=config.steps, figures="")

        def show(event: StepEvent, eager: StepEvent | None) -> None:
            bar.update(task, completed=event.step, description="training", figures=_figures(event, eager))

        yield show


def _plain(console: Console, config: TrainingConfig) -> Callable[[StepEvent, StepEvent | None], None]:
    def show(event: StepEvent, eager: StepEvent | None) -> None:
        if event.step == 1 or event.step % config.log_every == 0 or event.step == config.steps:
            _say(console, f"step {event.step:>5}/{config.steps}  {_figures(event, eager)}")

    return show


def _figures(event: StepEvent, eager: StepEvent | None) -> str:
    from optpass.units import format_seconds

    text = f"loss {event.loss:.4f}"
    if eager is not None:
        text += f"  eager {eager.loss:.4f}  difference {abs(event.loss - eager.loss):.1e}"
    return f"{text}  {format_seconds(event.step_s)}/step  {event.tokens_per_s:,.0f} tokens/s"


def _finish(console: Console, prepared: Prepared, outcome: Outcome, json: str | None, html: str | None) -> None:
    if outcome.eager:
        _say(console, _losses(outcome))
    output.emit(outcome.report, json=json, html=html)
    for line in ("", *_result(prepared, outcome)):
        _say(console, line)


def _losses(outcome: Outcome) -> str:
    """Both losses at a dozen steps, first and last among them."""
    last = len(outcome.steps) - 1
    shown = sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})
    rows = [f"{'step':>6}  {'optpass':>9}  {'eager':>9}  difference"]
    for i in shown:
        a, b = outcome.steps[i], outcome.eager[i]
        rows.append(f"{a.step:>6}  {a.loss:>9.5f}  {b.loss:>9.5f}  {abs(a.loss - b.loss):>10.1e}")
    return "\n".join(rows)


def _result(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    from optpass.training.loop import steady_seconds
    from optpass.units import format_seconds

    config, first, last = prepared.job.config, outcome.steps[0], outcome.steps[-1]
    validation = f", {outcome.validation_loss:.4f} on held-out text" if outcome.validation_loss is not None else ""
    yield f"loss {first.loss:.4f} -> {last.loss:.4f} in {len(outcome.steps)} steps{validation}"
    steady, eager = steady_seconds(outcome.steps), steady_seconds(outcome.eager)
    timing = f"first step {format_seconds(first.step_s)}, compile included"
    if steady:
        timing += f"; then {format_seconds(steady)} a step (median), {config.tokens_per_step / steady:,.0f} tokens/s"
    yield timing + (f"; eager {format_seconds(eager)}" if eager else "")
    worst = outcome.max_difference()
    if worst is not None:
        verdict = "holds" if outcome.holds(config.compare_tolerance) else "DOES NOT HOLD"
        yield (
            f"against eager: largest difference {worst[0]:.1e} at step {worst[1]}, "
            f"tolerance {config.compare_tolerance:g}: {verdict}"
        )
    memory = outcome.memory
    if memory is not None:
        from optpass.reporting.text import percent
        from optpass.units import format_bytes

        error = percent(abs(memory.predicted - memory.measured) / max(memory.measured, 1))
        yield (
            f"memory: {format_bytes(memory.predicted)} predicted, {format_bytes(memory.measured)} measured "
            f"(off by {error}), budget {format_bytes(memory.budget)}, {percent(memory.measured / memory.budget)} used: "
            + ("it fits" if memory.fits else "IT DOES NOT FIT")
        )
    yield "report: " + ", ".join(str(path) for path in outcome.paths)
