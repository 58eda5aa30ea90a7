"""`optpass report`: show reports and analyses that were written as JSON, merging reports into one."""

from __future__ import annotations

from typing import Annotated

import typer

from optpass.cli.flags import Html, Json
from optpass.errors import ReportError


def report(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Report or analysis files (.json).")],
    json: Json = None,
    html: Html = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Show reports and analyses from their JSON files; several reports are merged into one."""
    from optpass.cli.output import emit
    from optpass.reporting.files import read_json
    from optpass.reporting.merge import merge
    from optpass.reporting.model import Analysis, Report

    read = [read_json(path) for path in paths]
    reports = [obj for obj in read if isinstance(obj, Report)]
    shown: list[Report | Analysis] = [obj for obj in read if isinstance(obj, Analysis)]
    if reports:
        shown.append(merge(reports, across_runs=True) if len(reports) > 1 else reports[0])
    if len(shown) > 1 and (json is not None or html is not None):
        raise ReportError(
            f"--json and --html write one report or one analysis, and these files hold {len(shown)}; "
            "give one analysis, or reports only"
        )
    for index, obj in enumerate(shown):
        if index:
            typer.echo()
        emit(obj, json=json, html=html, top=top)
