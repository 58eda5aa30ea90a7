"""The audit's page: one offline HTML file under 300 KB, readable without JavaScript. The words come from `words`."""

from __future__ import annotations

import itertools
from typing import Any

from optpass.reporting.audit import words
from optpass.reporting.audit.baseline import Difference
from optpass.reporting.audit.files import Path_, write_text
from optpass.reporting.audit.model import Audit
from optpass.reporting.audit.source import Frame, frame
from optpass.reporting.html import LIMIT_BYTES, cut, environment
from optpass.reporting.text import percent
from optpass.units import format_seconds

_ROWS = 200  # entries per section at first; halved until the page fits
_OPEN = 3  # breaks whose details are open at first


def render_html(audit: Audit, *, difference: Difference | None = None) -> str:
    """The page as text, at most `LIMIT_BYTES` long in UTF-8: sections are cut, and say by how much, until it fits."""
    template = environment().get_template("audit.html.j2")
    rows = _ROWS
    while True:
        page = template.render(obj=audit, **_context(audit, difference, rows))
        if len(page.encode()) <= LIMIT_BYTES or rows == 1:
            return page
        rows = max(1, rows // 2)


def write_html(audit: Audit, path: Path_, *, difference: Difference | None = None) -> None:
    """Write the page, atomically; parent folders are made.

    Raises:
        AuditError: the path cannot be written; nothing is left behind.
    """
    write_text(render_html(audit, difference=difference), path)


def _context(audit: Audit, difference: Difference | None, rows: int) -> dict[str, Any]:
    columns = [(name.removeprefix(">"), name.startswith(">")) for name in words.FUNCTION_COLUMNS]
    return {
        "title": f"{audit.target or 'audit'}: audit",
        "subtitle": words.subtitle(audit),
        "headline": words.headline(audit),
        "cards": _cards(audit),
        "chains": cut(words.chains(audit), rows),
        "recompiles": cut(audit.recompiles, rows),
        "silent": cut(audit.silent_eager, rows),
        "function_columns": columns,
        "functions": cut(words.function_rows(audit), rows),
        "difference": _difference(difference, rows),
        "notes": cut(audit.notes, rows),
        "facts": [
            ("Observed by", cut(((what, str(how)) for what, how in audit.hooks.items()), rows)),
            ("Environment", cut(audit.environment.items(), rows)),
            ("Processes", cut(((f"rank {p.rank}", f"pid {p.pid} on {p.host}") for p in audit.processes), rows)),
        ],
        "words": words,
        "code": _code,
        "diff_lines": _diff_lines,
        "mark": lambda record: difference.status(record) if difference is not None else None,
        "opened": _OPEN,
    }


def _cards(audit: Audit) -> list[tuple[str, str, str]]:
    """(value, what it is, more of it) of the figures that matter most."""
    summary = audit.summary
    captured = summary.ops_captured_fraction
    share = percent(captured) if captured is not None else "not known"
    cards = [
        (str(summary.breaks), "graph breaks", f"{summary.graphs} graphs"),
        (str(summary.recompiles), "recompiles", words.count(len(audit.recompiles), "cause")),
        (str(summary.silent_eager), "silent eager", "functions that run uncompiled"),
        (share, "operations in graphs", "of all tensor operations"),
    ]
    for value, name, more in (
        (summary.t_first_s, "first calls", "compile included"),
        (summary.t_steady_s, "steady calls", "median after warm-up"),
    ):
        if value is not None:
            cards.append((format_seconds(value), name, more))
    return cards


def _difference(difference: Difference | None, rows: int) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "headline": difference.headline(),
        "counts": difference.counts,
        "groups": [
            (name, cut((finding.line() for finding in group), rows))
            for name, group in (("new", difference.new), ("gone", difference.gone), ("the same", difference.same))
        ],
    }


def _code(record: Any) -> list[tuple[int, str, str, str]]:
    """(line number, before, marked, behind) of the code frame; the marked part is empty but in the last line."""
    shown: Frame | None = frame(record, before=2)
    if shown is None:
        return []
    *context, (number, line) = shown.lines
    plain = [(n, text, "", "") for n, text in context]
    if shown.start is None:
        return [*plain, (number, "", line, "")]
    stop = shown.start + shown.width
    return [*plain, (number, line[: shown.start], line[shown.start : stop], line[stop:])]


def _diff_lines(diff: str, most: int = 60) -> list[tuple[str, str]]:
    """(class, line) of a diff's lines, the first of them."""
    kinds = {"+": "add", "-": "del", "@": "soft-line"}
    lines = diff.splitlines()
    shown = [(kinds.get(line[:1], ""), line) for line in itertools.islice(lines, most)]
    return shown if len(lines) <= most else [*shown, ("soft-line", f"... {len(lines) - most} more lines")]
