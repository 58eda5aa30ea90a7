"""A document as text: what its view in the terminal says, without colours, nothing cut."""

from __future__ import annotations

import io

from rich.console import Console

from optpass.reporting.audit.model import Audit
from optpass.reporting.audit.terminal import render as render_audit
from optpass.reporting.model import Analysis, Report
from optpass.reporting.plan.model import PlanReport
from optpass.reporting.plan.terminal import render_plan
from optpass.reporting.record import Document
from optpass.reporting.terminal import render_analysis, render_report


def render(document: Document, console: Console, *, top: int = 10) -> None:
    """Print `document` to `console`.

    Args:
        top: rows per table; how many are left out is said below it.
    """
    match document:
        case PlanReport():
            render_plan(document, console, top=top)
        case Analysis():
            render_analysis(document, console, top=top)
        case Audit():
            render_audit(document, console, top=top)
        case Report():
            render_report(document, console, top=top)
        case _:
            raise TypeError(f"{type(document).__name__} has no view in the terminal")


def shown(document: Document, *, top: int = 10) -> str:
    """The view as it goes into a pipe: Markdown tables, as wide as what they hold."""
    out = io.StringIO()
    render(document, Console(file=out, force_terminal=False, highlight=False, markup=False, emoji=False), top=top)
    return out.getvalue().rstrip("\n")
