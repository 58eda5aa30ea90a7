"""`optpass report`: show reports, analyses, plans and audits that were written as JSON, merging those that can be."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from optpass.cli.flags import Html, Json
from optpass.errors import ConfigError, ReportError

if TYPE_CHECKING:
    from optpass.reporting.model import Analysis, Report
    from optpass.reporting.plan.model import PlanReport


def report(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Report, analysis, plan or audit files (.json).")],
    json: Json = None,
    html: Html = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Show reports, analyses, plans and audits from their JSON files; several reports, or audits, become one."""
    from optpass.cli.output import emit
    from optpass.reporting.audit.files import is_audit
    from optpass.reporting.files import read_json
    from optpass.reporting.merge import merge
    from optpass.reporting.model import Report
    from optpass.reporting.writable import check_targets

    check_targets({"--json": json, "--html": html})
    if html is not None and os.path.realpath(html) in map(os.path.realpath, paths):
        raise ConfigError(f"--html {html}: would overwrite the file that is read; give the page another name")
    if any(map(is_audit, paths)):
        _audits(paths, json, html, top)
        return
    read = [read_json(path) for path in paths]
    reports = [obj for obj in read if isinstance(obj, Report)]
    shown: list[Report | Analysis | PlanReport] = [obj for obj in read if not isinstance(obj, Report)]
    if reports:
        shown.append(merge(reports, across_runs=True) if len(reports) > 1 else reports[0])
    if len(shown) > 1 and (json is not None or html is not None):
        raise ReportError(
            f"--json and --html write one report, analysis or plan, and these files hold {len(shown)}; "
            "give one analysis, one plan, or reports only"
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
