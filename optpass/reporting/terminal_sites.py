"""Sites in the terminal: per kind what was done, where, what it saves, and what was left alone and why."""

from __future__ import annotations

from rich.console import Console

from optpass.reporting import layout, sites, summary, text
from optpass.reporting.model import Analysis, Report

_PLACES = 3  # places shown of one reason


def render_sites(report: Report | Analysis, console: Console, *, top: int) -> None:
    """Print one section per kind of site; nothing where there are no sites.

    Args:
        top: changes and reasons shown per kind; how many are left out is said below them.
    """
    for kind in sites.by_kind(report):
        layout.heading(console, kind.title, sites.figures(kind.cost) if len(kind.applied) > 1 else "")
        for row in kind.applied[:top]:
            layout.say(console, text.change(row.site.before, row.site.after) + _count(row.count))
            _dim(console, text.where(row.modules, summary.place(row.site.file, row.site.line)))
            _dim(console, row.figures)
            _dim(console, row.site.reason)
        layout.more(console, top, len(kind.applied), "kinds of change")
        for reason in kind.declined[:top]:
            layout.say(console, f"declined: {reason.reason}{_count(reason.count)}", "yellow")
            for row in reason.rows[:_PLACES]:
                _declined(console, row, counted=len(reason.rows) > 1)
            layout.more(console, _PLACES, len(reason.rows), "places")
        layout.more(console, top, len(kind.declined), "reasons")


def _declined(console: Console, row: sites.SiteRow, *, counted: bool) -> None:
    """Where, what stands there, the node that stood in the way, and both figures where it was a matter of cost."""
    place = text.where(row.modules, summary.place(row.site.file, row.site.line))
    made = summary.place(row.site.node_file, row.site.node_line)
    node = f"at node {row.nodes}{f' ({made})' if made else ''}" if row.nodes else ""
    _dim(console, " ".join(part for part in (place, node) if part) + _count(row.count if counted else 1))
    _dim(console, row.site.before)
    _dim(console, row.figures)


def _count(count: int) -> str:
    return f" ({count} sites)" if count > 1 else ""


def _dim(console: Console, line: str) -> None:
    if line:
        layout.say(console, f"    {line}", "dim")
