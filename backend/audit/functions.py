"""Compiled functions: graphs, compiles, first and steady calls. What Dynamo makes behind a break counts as theirs."""

from __future__ import annotations

import statistics
import threading
import types
from collections import deque
from dataclasses import dataclass, field

from optpass.backend.audit.events import CallEvent, FrameEvent
from optpass.reporting.audit.model import FunctionRecord

#: Steady calls kept for the median.
KEPT_CALLS = 1001

Key = tuple[str, int, str]


@dataclass
class _Entry:
    """One function as it is gathered."""

    key: Key
    graphs: int = 0
    compiles: int = 0
    broken: bool = False
    compile_s: float = 0.0
    ops: dict[int, int] = field(default_factory=dict)
    guards: dict[int, float] = field(default_factory=dict)
    held: list[object] = field(default_factory=list)
    calls: int = 0
    first_s: float | None = None
    steady: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))


class FunctionCollector:
    """Adds up frames and calls per function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}

    def on_frame(self, event: FrameEvent) -> None:
        """Count a frame that was compiled, or that broke."""
        code, origin = event.code, event.origin
        if code is None or origin is None or not (event.compiled or event.breaks):
            return
        with self._lock:
            entry = self._entry(origin)
            entry.graphs += len(event.graphs)
            entry.compiles += event.compiled and not event.resumed
            entry.broken |= bool(event.breaks) or not event.compiled
            entry.compile_s += event.seconds
            if event.compiled:
                entry.held.append(code)  # so that its id stays its own
                entry.ops[id(code)] = event.graphs[-1].ops if event.graphs else 0
                entry.guards[id(code)] = float(event.guard_us or 0.0)

    def on_call(self, event: CallEvent) -> None:
        """Count a call from outside."""
        with self._lock:
            entry = self._entry(event.code)
            entry.calls += 1
            if entry.first_s is None:
                entry.first_s = event.seconds
            elif not event.compiles:
                entry.steady.append(event.seconds)

    def knows(self, file: str, line: int | None) -> bool:
        """Whether a function that begins there was compiled."""
        with self._lock:
            return any(key[:2] == (file, line) for key in self._entries)

    def graphs(self) -> int:
        """Graphs compiled, over all functions."""
        with self._lock:
            return sum(entry.graphs for entry in self._entries.values())

    def records(self) -> list[FunctionRecord]:
        """The functions, those that took longest to compile first."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda entry: (-entry.compile_s, entry.key))
            return [_record(entry) for entry in entries]

    def _entry(self, code: types.CodeType) -> _Entry:
        key = (code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name))
        return self._entries.setdefault(key, _Entry(key))


def _record(entry: _Entry) -> FunctionRecord:
    file, line, function = entry.key
    captured = sum(entry.ops.values())
    return FunctionRecord(
        file=file,
        line=line,
        function=function,
        graphs=entry.graphs,
        compiles=entry.compiles,
        ops_captured=captured,
        ops_total=captured if entry.compiles and not entry.broken else None,
        compile_s=entry.compile_s,
        t_first_s=entry.first_s,
        t_steady_s=statistics.median(entry.steady) if entry.steady else None,
        calls=entry.calls,
        guard_us=sum(entry.guards.values()) if entry.guards else None,
    )
