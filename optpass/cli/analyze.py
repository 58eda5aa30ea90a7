"""`optpass analyze`: reads the flags, shows progress and the result. The analysis itself is `optpass.api.analyze`."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer

from optpass.cli.flags import Device, Html, Json, Sets, pairs
from optpass.cli.progress import bar
from optpass.errors import ConfigError
from optpass.reporting.writable import check_targets

#: Characters of a figure's source in the list of devices; `sources` of the spec has it whole.
_SOURCE = 60


def analyze(
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="A model's name, file.py:factory, hf:<model_type>, or a .onnx file."),
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="Size of a model by name; default: small.")] = None,
    set_: Sets = None,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward, rather than inference.")] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of parameters and inputs: fp32, bf16, fp16, fp64.")
    ] = None,
    device: Device = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="Rows per table.")] = 10,
    json: Json = None,
    html: Html = None,
    list_: Annotated[bool, typer.Option("--list", help="List the models by name, with their sizes.")] = False,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="List the devices and their figures.")] = False,
) -> None:
    """Predict the time, FLOPs and bytes of every op of a model, without running, compiling or allocating it.

    A factory is a function that returns (module, inputs) or (module, inputs, kwargs); --set passes it arguments.
    """
    if list_ or list_devices:
        if list_:
            _list_models()
        if list_devices:
            _list_devices()
        return
    if target is None:
        raise ConfigError("no target given; see optpass analyze --help, or --list for the models by name")
    settings = pairs(set_, "--set")
    check_targets({"--json": json, "--html": html})
    with quiet(), bar("loading") as told:
        from optpass.api import analyze as run

        analysis = run(target, device=device, train=train, dtype=dtype, size=size, sets=settings, progress=told)
    from optpass.cli.output import emit

    emit(analysis, json=json, html=html, top=top)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep standard output for the result: what the user's program prints goes to standard error.

    Torch's own logs of an error are dropped, since the error is told in one line; TORCH_LOGS brings them back.
    """
    import logging
    import warnings

    from optpass.cli.output import result_only

    before = logging.root.manager.disable
    with result_only(), warnings.catch_warnings():
        if "TORCH_LOGS" not in os.environ:
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def _list_models() -> None:
    from optpass.models.registry import describe, names, sizes

    width = max(map(len, names()))
    columns = max(len(", ".join(sizes(name))) for name in names())
    for name in names():
        typer.echo(f"{name:<{width}}  {', '.join(sizes(name)):<{columns}}  {describe(name)}")


def _list_devices() -> None:
    from optpass.passes.devices import DTYPES, table

    shown = [dtype for dtype in DTYPES if any(dtype in spec.peak_flops for spec in table().values())]
    columns = " ".join(f"{dtype:>9}" for dtype in shown)
    typer.echo("Dense matmul peaks in TFLOP/s, memory bandwidth in GB/s.")
    typer.echo(f"{'key':<18} {columns} {'GB/s':>7} {'GiB':>5}   name; source of peaks")
    for key, spec in table().items():
        if spec.kind == "cpu":
            continue
        peaks = [f"{spec.peak_flops[d] / 1e12:>9.4g}" if d in spec.peak_flops else f"{'-':>9}" for d in shown]
        memory = f"{spec.memory_bytes / 2**30:>5.0f}" if spec.memory_bytes else f"{'-':>5}"
        cited = list(dict.fromkeys(v for k, v in spec.sources.items() if k.startswith("peak_flops.")))
        source = textwrap.shorten(cited[0], _SOURCE, placeholder=" ...") if cited else "-"
        figures = " ".join([*peaks, f"{spec.bandwidth / 1e9:>7.0f}", memory])
        typer.echo(f"{key:<18} {figures}   {spec.name}; {source}")
    typer.echo("'cpu' is this machine's processor, measured once and cached: optpass env shows its figures.")
