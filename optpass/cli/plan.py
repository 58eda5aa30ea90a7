"""`optpass plan`: reads the flags, shows progress and the plan. Planning itself is `optpass.plan_api.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpass.cli.analyze import quiet
from optpass.cli.flags import Device, Html, Json, OptionPairs, Sets, pairs, tell_shadowed
from optpass.cli.progress import bar
from optpass.errors import ConfigError
from optpass.reporting.writable import check_targets

if TYPE_CHECKING:
    from optpass.planning.request import Progress
    from optpass.reporting.plan.model import PlanReport


def plan(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A model's name, file.py:factory, hf:<model_type>, or a training file."),
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="SIZE", help="Most memory: 20GiB, 500MB, 80%, or bytes.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", metavar="NAME", help="Optimizer whose state counts: adamw, sgd, ...")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="N", help="Micro-batch, or auto for the largest that fits.")
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option("--accumulation", min=1, metavar="N", help="Micro-batches per optimizer step.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="fsdp:N", help="Divide the model's state among N devices.")
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="Size of a model by name; default: small.")] = None,
    set_: Sets = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of parameters and inputs: fp32, bf16, fp16, fp64.")
    ] = None,
    device: Device = None,
    option: OptionPairs = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="Rows per list.")] = 10,
    json: Json = None,
    html: Html = None,
) -> None:
    """Plan the memory of a training step: what is saved, what is recomputed, and what it costs. Nothing is run.

    A training file brings its model, batch, optimizer and budget; flags win over it, but for --option, which its
    [options] and optpass.toml win over. Without a budget the plan is the one in which nothing is recomputed for
    memory's sake, with the curve of all others.
    """
    check_targets({"--json": json, "--html": html})
    given = {
        "memory_budget": budget, "optimizer": optimizer, "batch": batch, "accumulation": accumulation, "shard": shard,
        "device": device,
    }  # fmt: skip
    with quiet(), bar("loading") as told:
        if target.lower().endswith(".toml"):
            _only_for_models(size=size, dtype=dtype, set=set_)
            found = _of_file(Path(target), given, pairs(option, "--option"), told)
        else:
            found = _of_target(
                target, given, size=size, sets=pairs(set_, "--set"), dtype=dtype, option=pairs(option, "--option"),
                told=told,
            )  # fmt: skip
    from optpass.cli.output import emit

    emit(found, json=json, html=html, top=top)


def _of_target(
    target: str,
    given: Mapping[str, object],
    *,
    size: str | None,
    sets: dict[str, str],
    dtype: str | None,
    option: dict[str, str],
    told: Progress | None,
) -> PlanReport:
    from optpass.options import resolve
    from optpass.plan_api import plan as run

    flags: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    options = resolve(cli=option)
    tell_shadowed(options, option)
    return run(target, size=size, sets=sets, dtype=dtype, options=options, progress=told, **flags)


def _of_file(path: Path, flags: Mapping[str, object], option: dict[str, str], told: Progress | None) -> PlanReport:
    from optpass.training.config import load
    from optpass.training.planned import plan_file

    if option:
        tell_shadowed(load(path, option_pairs=option).options, option)
    return plan_file(path, flags={k: v for k, v in flags.items() if v is not None}, option_pairs=option, progress=told)


def _only_for_models(**flags: object) -> None:
    for name, value in flags.items():
        if value is not None:
            raise ConfigError(f"--{name} belongs to a model by name; a training file sets its model in [training]")
