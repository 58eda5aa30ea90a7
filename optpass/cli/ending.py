"""Signals that ask a process to end, as exceptions, so that what was reached can be written first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The process was asked to end by a signal other than Ctrl-C's.

    Attributes:
        exit_code: as shells have it, 128 and the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """SIGTERM (schedulers, `kill`) and SIGHUP (a closed terminal) as `Terminated`; one that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread only
        return

    def raise_(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, raise_) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
