"""The audit in the terminal: the few lines that matter, with code frames. The words come from `words`."""

from __future__ import annotations

from rich.console import Console

from optpass.reporting import layout
from optpass.reporting.audit import words
from optpass.reporting.audit.baseline import Difference
from optpass.reporting.audit.model import Audit, Fix, Recompile, SilentEager
from optpass.reporting.audit.source import frame

_FOLLOWERS = 3  # breaks that follow from another, told one by one
_DIFF_LINES = 40


def render(audit: Audit, console: Console, *, top: int = 10, difference: Difference | None = None) -> None:
    """Print an audit: counts, breaks with their code, recompiles, what runs eager, functions, the difference.

    Args:
        top: entries per section; how many are left out is said below it.
        difference: from a baseline.
    """
    layout.title(console, "optpass audit" + (f": {audit.target}" if audit.target else ""), words.subtitle(audit))
    if audit.partial:
        layout.say(console, f"partial: {audit.partial}", "yellow")
    layout.say(console, words.headline(audit))
    _breaks(console, audit, top, difference)
    _recompiles(console, audit, top, difference)
    _silent(console, audit, top, difference)
    if len(audit.functions) > 1 or (audit.functions and not (audit.breaks or audit.recompiles or audit.silent_eager)):
        layout.heading(console, "Compiled functions", "those that took longest to compile first")
        rows = words.function_rows(audit)
        layout.table(console, words.FUNCTION_COLUMNS, rows[:top])
        layout.more(console, top, len(rows), "functions")
    if difference is not None:
        render_difference(difference, console, top=top)
    layout.listed(console, "Notes", audit.notes)


def render_difference(difference: Difference, console: Console, *, top: int = 10) -> None:
    """Print what is new and gone since the baseline, and the counts before and after."""
    layout.heading(console, difference.headline()[0].upper() + difference.headline()[1:])
    for name, group, style in (("new", difference.new, "red"), ("gone", difference.gone, "green")):
        for finding in group[:top]:
            layout.say(console, f"{name}: {finding.line()}", style)
        layout.more(console, top, len(group), name)
    changed = [(name, f"{a} -> {b}") for name, a, b in difference.counts if a != b]
    layout.pairs(console, changed)


def _breaks(console: Console, audit: Audit, top: int, difference: Difference | None) -> None:
    rows = words.chains(audit)
    if not rows:
        return
    layout.heading(console, "Graph breaks", "the costliest first")
    for row in rows[:top]:
        record = row.record
        times = f"  x{record.occurrences}" if record.occurrences > 1 else ""
        mark = " [new]" if difference is not None and difference.status(record) == "new" else ""
        layout.say(console, f"{row.number}. {words.where(record, audit.root)}{times}{mark}", "bold")
        layout.say(console, f"   {words.kind(record)}: {record.reason}")
        if (shown := frame(record)) is not None:
            _indented(console, shown.text())
        _named(console, "effect", words.effect(record))
        _named(console, "cost", words.cost(record.cost))
        _fix(console, record.fix)
        for follower in row.followers[:_FOLLOWERS]:
            at = words.where(follower, audit.root)
            layout.say(console, f"   follows from it: {at}: {words.kind(follower)}", "dim")
        layout.more(console, _FOLLOWERS, len(row.followers), "that follow from it")
    layout.more(console, top, len(rows), "breaks")


def _recompiles(console: Console, audit: Audit, top: int, difference: Difference | None) -> None:
    if not audit.recompiles:
        return
    layout.heading(console, "Recompiles", "the costliest first")
    for record in audit.recompiles[:top]:
        _head(console, record, audit.root, f"  x{record.count}" if record.count > 1 else "", difference)
        layout.say(console, f"   {words.changed(record)}")
        for name, value in words.recompile_facts(record):
            _named(console, name, value)
        _fix(console, record.fix)
    layout.more(console, top, len(audit.recompiles), "recompiles")


def _silent(console: Console, audit: Audit, top: int, difference: Difference | None) -> None:
    if not audit.silent_eager:
        return
    layout.heading(console, "Silent eager", "asked to compile, and runs uncompiled")
    for record in audit.silent_eager[:top]:
        _head(console, record, audit.root, "", difference)
        layout.say(console, f"   {words.silent(record)}" + (f": {record.reason}" if record.reason else ""))
        _fix(console, record.fix)
    layout.more(console, top, len(audit.silent_eager), "functions")


def _head(
    console: Console, record: Recompile | SilentEager, root: str, times: str, difference: Difference | None
) -> None:
    mark = " [new]" if difference is not None and difference.status(record) == "new" else ""
    layout.say(console, f"- {words.where_function(record, root)}{times}{mark}", "bold")


def _fix(console: Console, fix: Fix) -> None:
    _named(console, "fix", fix.text)
    if fix.diff:
        lines = fix.diff.splitlines()
        _indented(console, "\n".join(lines[:_DIFF_LINES]))
        layout.more(console, _DIFF_LINES, len(lines), "lines of the diff")
        _named(console, "note", fix.note)
    _named(console, "verified", words.verdict(fix.verified, fix.outcome))


def _named(console: Console, name: str, value: str) -> None:
    if value:
        layout.say(console, f"   {name}: {' '.join(value.split())}")


def _indented(console: Console, block: str) -> None:
    for line in block.splitlines():
        style = {"+": "green", "-": "red"}.get(line[:1], "cyan")
        layout.say(console, f"     {line}", style)
