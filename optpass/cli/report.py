"""`optpass report`: show reports, analyses and audits that were written as JSON, merging those of one kind into one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from optpass.cli.flags import Html, Json
from optpass.errors import ReportError


def report(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Report, analysis or audit files (.json).")],
    json: Json = None,
    html: Html = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Show reports, analyses and audits from their JSON files; several reports, or audits, are merged into one."""
    from optpass.cli.output import emit
    from optpass.reporting.audit.files import is_audit
    from optpass.reporting.files import read_json
    from optpass.reporting.merge import merge
    from optpass.reporting.model import Analysis, Report

    if any(map(is_audit, paths)):
        _audits(paths, json, html, top)
        return
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


def _audits(paths: list[str], json: str | None, html: str | None, top: int) -> None:
    """Audits, merged into one; every file must be one."""
    from optpass.auditing.outputs import write_as
    from optpass.cli.output import STDOUT, console
    from optpass.reporting.audit.files import read, to_json
    from optpass.reporting.audit.merge import merge
    from optpass.reporting.audit.terminal import render

    found = merge([read(path) for path in paths])
    written = {path: view for path, view in ((json, "json"), (html, "html")) if path not in (None, STDOUT)}
    for path, view in written.items():
        write_as(found, str(path), view)
    if json == STDOUT:
        sys.stdout.write(to_json(found))
    else:
        render(found, console(), top=top)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
