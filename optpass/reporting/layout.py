"""Rich building blocks of the terminal view: titles, tables, pairs. Nothing here knows what a report holds.

Text from the user's program goes through `text`, so that it is never read as rich markup and cannot drive the
terminal. Off a terminal (a pipe, a file) tables are Markdown, as wide as their content: nothing is cut or wrapped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDE = 140  # columns from which a table holds one figure per column
_UNBOUNDED = 1_000_000


def text(value: str | Text, style: str = "") -> Text:
    """Plain text as it is, control characters as spaces."""
    if isinstance(value, Text):
        return value
    return Text("".join(c if c.isprintable() else " " for c in value), style=style, overflow="fold")


def lines(*parts: str | Text) -> Text:
    """Several lines in one cell; empty ones are left out."""
    return Text("\n", overflow="fold").join([text(part) for part in parts if str(part)])


def is_wide(console: Console) -> bool:
    """Whether there is room for one figure per column."""
    return not console.is_terminal or console.width >= WIDE


def say(console: Console, line: str, style: str = "") -> None:
    """One paragraph; off a terminal one line, however long."""
    console.print(text(line, style), soft_wrap=not console.is_terminal, highlight=False)


def title(console: Console, line: str, subtitle: str) -> None:
    """The top line of a view."""
    say(console, line, "bold")
    if subtitle:
        say(console, subtitle, "dim")


def heading(console: Console, line: str, note: str = "") -> None:
    """The top line of a section, with a note on what it shows."""
    console.print()
    parts = [text(line, "bold cyan"), *([text(f"  {note}", "dim")] if note else [])]
    console.print(Text.assemble(*parts), soft_wrap=not console.is_terminal, highlight=False)


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A table; a column named `>x` is aligned right and never wrapped."""
    plain = not console.is_terminal
    result = Table(box=box.MARKDOWN if plain else box.SIMPLE_HEAD, pad_edge=plain, show_edge=plain, highlight=False)
    for name in columns:
        right = name.startswith(">")
        header = text(name.removeprefix(">"), "bold")
        result.add_column(header, justify="right" if right else "left", no_wrap=plain or right, overflow="fold")
    for row in rows:
        result.add_row(*(text(cell) for cell in row))
    whole(console, result)


def pairs(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Names and values in two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(text(name), text(value))
    whole(console, grid)


def listed(console: Console, line: str, items: Sequence[str], style: str = "") -> None:
    """A section of one line per item; nothing where there is none."""
    if items:
        heading(console, line)
        for item in items:
            say(console, f"- {item}", style)


def more(console: Console, shown: int, total: int, what: str) -> None:
    """Says how many were left out."""
    if total > shown:
        say(console, f"... and {total - shown} more {what}", "dim")


def whole(console: Console, renderable: RenderableType) -> None:
    """Print to the terminal's width; off a terminal as wide as the content is, without trailing blanks."""
    if console.is_terminal:
        console.print(renderable)
        return
    buffer = io.StringIO()
    unbounded = Console(file=buffer, width=_UNBOUNDED, color_system=None, highlight=False)
    needed = unbounded.measure(renderable).maximum
    unbounded.print(renderable, width=max(needed, 1))
    rows = [row.rstrip() for row in buffer.getvalue().splitlines()]
    console.print(Text("\n".join(row for row in rows if row)), soft_wrap=True, highlight=False)
