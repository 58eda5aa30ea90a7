"""`optpass bench`: list the benchmarks, or run one, print its table and keep its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from optpass.cli.flags import Json
from optpass.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from optpass.bench.result import Result

_FAILED = 1


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Benchmark to run; without it, list them.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the benchmarks and what each claims.")] = False,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Models to measure; default: the benchmark's own set.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Size of the models; default: the benchmark's own.")
    ] = None,
    device: Annotated[str, typer.Option("--device", "-d", help="Where to measure: cpu or cuda.")] = "cpu",
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Samples of each case, at most.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.0, metavar="SECONDS", help="Begin no new round after this time.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short look, without a verdict on the claim.")] = False,
    inner: Annotated[
        str, typer.Option("--inner", help="Inner compiler, where a benchmark measures several: inductor or aot_eager.")
    ] = "inductor",
    seed: Annotated[int, typer.Option("--seed", help="Of order, weights and bootstrap.")] = 0,
    json: Json = None,
) -> None:
    """Measure a performance claim on this machine.

    The result goes to PATH of --json; without it, a full run (no --quick, --models, --size or --inner) in a source
    checkout goes to bench/results/DEVICE-NAME.json. Exit code 0: the claim holds, or the measurement cannot tell; 1: it
    does not hold; 2: bad input, or the benchmark could not run.
    """
    from optpass.bench.registry import BenchConfig, load, names

    if list_ or name is None:
        for known in names():
            typer.echo(f"{known}: {load(known).claim}")
        return
    chosen = load(name)
    if inner not in ("inductor", "aot_eager"):
        raise ConfigError(f"--inner {inner!r}: valid: inductor, aot_eager")
    config = BenchConfig(
        models=_models(models, chosen.models), size=size, rounds=rounds, budget_s=budget, quick=quick, device=device,
        seed=seed, inner=inner,
    )  # fmt: skip
    from optpass.reporting.writable import check_target

    check_target("--json", json)
    from optpass.bench.progress import progress

    with progress(chosen.name) as told:
        result = chosen.run(config, told)
    _hand_over(result, json, keep=config.full)
    if result.passed is False:
        raise typer.Exit(_FAILED)


def _models(text: str | None, names: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """`"gpt, mlp"` as names that the benchmark knows, each once."""
    if text is None:
        return ()
    from optpass.errors import did_you_mean

    chosen, known = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip())), names()
    if not chosen:
        raise ConfigError(f"--models {text!r} names no model; valid: {', '.join(known)}")
    for model in chosen:
        if model not in known:
            raise ConfigError(f"--models: unknown model {model!r}; {did_you_mean(model, known)}")
    return chosen


def _hand_over(result: Result, json: str | None, *, keep: bool) -> None:
    """The JSON alone on standard output for `--json -`; else the table, and the file where one is due."""
    if json == "-":
        typer.echo(result.to_json(), nl=False)
        return
    from optpass.bench.result import result_path
    from optpass.bench.table import show
    from optpass.reporting.files import write_text

    show(result)
    target: str | Path | None = json or (result_path(result) if keep else None)
    if target is not None:
        write_text(result.to_json(), target)
        typer.echo(f"written: {target}")
