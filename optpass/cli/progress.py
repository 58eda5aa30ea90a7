"""A bar for work that says how far it is, on standard error where that is a terminal. Imports rich only there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

#: (fraction done or None where it is not known, what is being done)
Told = Callable[[float | None, str], None]


@contextlib.contextmanager
def bar(first: str) -> Iterator[Told | None]:
    """A callback that moves the bar; None where there is no terminal.

    Args:
        first: shown until the callback is called.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from optpass.cli.output import console

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as shown:
        task = shown.add_task(first, total=None)

        def told(fraction: float | None, text: str) -> None:
            if fraction is None:
                shown.update(task, description=text, total=None)
            else:
                shown.update(task, description=text, total=1.0, completed=fraction)

        yield told


@contextlib.contextmanager
def calibrating() -> Iterator[Callable[[float, str], None] | None]:
    """`bar` for measuring the processor; a line where there is no terminal, since it takes 10 to 20 s."""
    if not sys.stderr.isatty():
        print("measuring this CPU (10 to 20 s) ...", file=sys.stderr)
    with bar("measuring this CPU") as told:
        yield None if told is None else lambda fraction, text: told(fraction, f"measuring this CPU: {text}")
