"""A benchmark's result as text: a rich table on a terminal, aligned columns anywhere else. Nothing is computed here."""

from __future__ import annotations

import sys
from typing import TextIO

from optpass.bench.result import Result, Row
from optpass.bench.stats import CONFIDENCE
from optpass.units import format_seconds

_INTERVAL = f"{CONFIDENCE:.0%} interval"
_HEADERS = ("measured on", "case", "rounds", "median", _INTERVAL, "ratio", _INTERVAL, "verdict")
_COLOURS = {"FASTER": "green", "SLOWER": "red", "SAME": "cyan", "UNCLEAR": "yellow"}


def show(result: Result, file: TextIO | None = None) -> None:
    """Print the result: conditions, table, finding, notes."""
    out = file or sys.stdout
    print(f"{result.name}: {result.claim}\n{conditions(result)}\n", file=out)
    headers, lines = columns(result.rows)
    if out.isatty():
        _rich(headers, lines, out)
    else:
        print(plain(headers, lines), file=out)
    print(f"\n{finding(result)}", file=out)
    for note in result.notes:
        print(f"note: {note}", file=out)


def conditions(result: Result) -> str:
    """One line: on what, with what, under what load."""
    env = result.environment
    parts = [f"{env.kind}", f"{env.cores} cores", f"torch {env.torch}", f"Python {env.python}", env.os]
    parts += [f"revision {env.revision}"] if env.revision else []
    if env.load_before is not None and env.load_after is not None:
        parts.append(f"load {env.load_before:g} before, {env.load_after:g} after")
    return ", ".join(parts)


def finding(result: Result) -> str:
    """One line: whether the claim holds, and by which figure."""
    word = {True: "PASSED", False: "FAILED", None: "UNDECIDED"}[result.passed]
    return f"{word}: {result.finding}" if result.finding else word


def columns(rows: tuple[Row, ...]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; a column that is empty in every row is left out, extra columns come last."""
    extra = list(dict.fromkeys(key for row in rows for key in row.extra))
    headers = [*_HEADERS, *extra]
    lines = [[*_cells(row), *(_extra(row.extra.get(key)) for key in extra)] for row in rows]
    kept = [i for i in range(len(headers)) if any(line[i] for line in lines)]
    return [headers[i] for i in kept], [[line[i] for i in kept] for line in lines]


def plain(headers: list[str], lines: list[list[str]]) -> str:
    """Columns aligned with spaces, figures to the right."""
    widths = [max(len(line[i]) for line in [headers, *lines]) for i in range(len(headers))]
    right = [all(not line[i] or line[i][0] in "0123456789[-" for line in lines) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, lines)])


def _cells(row: Row) -> list[str]:
    spread = (row.ci_low, row.ci_high)
    return [
        row.group,
        row.case,
        str(len(row.samples)) if row.samples else "",
        _figure(row.median, row.unit),
        f"[{_figure(spread[0], row.unit)}, {_figure(spread[1], row.unit)}]" if None not in spread else "",
        f"{row.ratio:.3f}" if row.ratio is not None else "",
        f"[{row.ratio_ci[0]:.3f}, {row.ratio_ci[1]:.3f}]" if row.ratio_ci else "",
        row.verdict or "",
    ]


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return format_seconds(value) if unit == "s" else f"{value:.4g} {unit}".rstrip()


def _extra(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4g}"


def _rich(headers: list[str], lines: list[list[str]], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for header in headers:
        table.add_column(header, no_wrap=header == "verdict", justify="left" if header in _HEADERS[:2] else "right")
    for cells in lines:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in cells))
    Console(file=out).print(table)
