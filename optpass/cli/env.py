"""`optpass env`: prints what a bug report needs. Collecting the facts is `environment_facts`' business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from optpass.cli.flags import Json

_FAILED = 1


def env(
    json: Json = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this CPU (10 to 20 s) and any GPU first, and keep the result."),
    ] = False,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Only check that this torch has the hooks optpass needs; exit 1 if not.")
    ] = False,
) -> None:
    """Print what a bug report needs: versions, hardware, compilers, settings, calibration."""
    from optpass.cli.analyze import quiet
    from optpass.reporting.writable import check_target

    check_target("--json", json)
    with quiet():
        from optpass.cli import environment_facts as facts

        if calibrate:
            from optpass.cli.progress import calibrating
            from optpass.passes.roofline import calibration

            with calibrating() as told:
                calibration.calibrated_spec(told, force=True)
            facts.calibrate_gpus()
        found: dict[str, Any] = {"schema": facts.SCHEMA, "hooks": facts.hooks()} if hooks else facts.collect()
    _show(found, json)
    if hooks and found["hooks"]["missing"]:
        raise typer.Exit(_FAILED)


def _show(found: Mapping[str, Any], json: str | None) -> None:
    if json is not None:
        import json as encoder

        text = encoder.dumps(found, indent=1) + "\n"
        if json == "-":
            typer.echo(text, nl=False)
            return
        from optpass.reporting.files import write_text

        write_text(text, json)
    for line in _lines(found):
        typer.echo(line)
    if json is not None:
        typer.echo(f"wrote {json}", err=True)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Sections of `key: value`; lists one item a line."""
    for section, content in found.items():
        if section == "schema":
            continue
        yield f"[{section}]"
        for key, value in content.items():
            if isinstance(value, list):
                yield f"{key}: {'none' if not value else ''}".rstrip()
                yield from (f"  {item}" for item in value)
            elif isinstance(value, Mapping):
                yield f"{key}: " + ", ".join(f"{k} {v}" for k, v in value.items())
            else:
                yield f"{key}: {value}"
        yield ""
