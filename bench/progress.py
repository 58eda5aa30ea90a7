"""How far a benchmark is, on standard error: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

#: Seconds between two lines where there is no terminal: enough to see life in a log, too few to fill it.
_QUIET_S = 20.0


class Progress(Protocol):
    """What a benchmark reports to while it runs."""

    def start(self, total: int) -> None:
        """The number of steps to come; may be called again with a better figure."""

    def step(self, label: str, count: int = 0) -> None:
        """`label` begins now; `count` steps were finished since the last call."""


class NoProgress:
    """Says nothing."""

    def start(self, total: int) -> None:
        """See `Progress`."""

    def step(self, label: str, count: int = 0) -> None:
        """See `Progress`."""


class _Lines:
    """A line on standard error at most every `_QUIET_S` seconds."""

    def __init__(self, title: str) -> None:
        self.title, self.total, self.done = title, 0, 0
        self.said = time.monotonic()

    def start(self, total: int) -> None:
        self.total = total

    def step(self, label: str, count: int = 0) -> None:
        self.done += count
        if time.monotonic() - self.said >= _QUIET_S:
            self.said = time.monotonic()
            print(f"{self.title}: {self.done}/{self.total}: {label}", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A bar with elapsed and remaining time while the block runs, removed afterwards; lines without a terminal."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, title=title)

        class _Bar:
            def start(self, total: int) -> None:
                bar.update(task, total=total)

            def step(self, label: str, count: int = 0) -> None:
                bar.update(task, advance=count, description=label)

        yield _Bar()
