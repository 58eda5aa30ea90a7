"""How every verb shows a report or an analysis: the terminal view, the JSON file, the page. No verb lives here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from optpass.reporting.model import Analysis, Report
    from optpass.reporting.plan.model import PlanReport

STDOUT = "-"
#: Columns below which no view is laid out: `COLUMNS=0`, which some schedulers set, would leave nothing of it.
_NARROWEST = 40


def console(*, stderr: bool = False) -> Console:
    """A rich console on standard output or standard error; plain where that is not a terminal.

    Characters that the stream cannot encode are replaced, so that printing a name never fails. A reader that left is
    told by `BrokenPipeError`, as by any other stream.
    """
    from rich.console import Console

    class Told(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends the process by exit code 1, which has another meaning here
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    made = Told(file=stream, highlight=False, markup=False, emoji=False)
    if made.width < _NARROWEST:
        made.width = _NARROWEST
    return made


@contextlib.contextmanager
def result_only() -> Iterator[None]:
    """Keep standard output for the result: what else prints there, from Python or C, goes to standard error."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        kept = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if kept is not None:
                with contextlib.suppress(OSError):
                    os.dup2(2, 1)
            yield
    finally:
        if kept is not None:
            ctypes.CDLL(None).fflush(None)  # what C printed and still holds
            os.dup2(kept, 1)
            os.close(kept)


def emit(
    obj: Report | Analysis | PlanReport, *, json: str | None = None, html: str | None = None, top: int = 10
) -> None:
    """Show a report, an analysis or a plan, and write the files asked for.

    Files are written first, so that a path that cannot be written is an error before anything is printed; where they
    lie is said on standard error. With `json="-"` standard output holds the JSON and nothing else: the terminal
    view is left out.

    Args:
        json: path of the JSON file; "-" for standard output.
        html: path of the page.
        top: rows per table of the terminal view.

    Raises:
        ReportError: a file cannot be written.
    """
    written = write_files(obj, json, html)
    if json != STDOUT:
        render(obj, top=top)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def write_files(obj: Report | Analysis | PlanReport, json: str | None, html: str | None) -> list[str]:
    """The files that were asked for, and the JSON on standard output where it was; the paths of the files.

    Raises:
        ReportError: a file cannot be written.
    """
    from optpass.reporting.files import to_json, write_text

    text = to_json(obj) if json is not None else ""
    written = []
    if json is not None and json != STDOUT:
        write_text(text, json)
        written.append(json)
    if html is not None:
        write_page(obj, html)
        written.append(html)
    if json == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    return written


def write_page(obj: Report | Analysis | PlanReport, path: str) -> None:
    """The page of a report, an analysis or a plan.

    Raises:
        ReportError: the path cannot be written.
    """
    from optpass.reporting.plan.model import PlanReport

    if isinstance(obj, PlanReport):
        from optpass.reporting.plan.html import write_plan_html

        write_plan_html(obj, path)
    else:
        from optpass.reporting.html import write_html

        write_html(obj, path)


def render(obj: Report | Analysis | PlanReport, *, top: int = 10) -> None:
    """The terminal view on standard output."""
    from optpass.reporting import shown

    shown.render(obj, console(), top=top)
