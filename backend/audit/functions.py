"""Compiled functions: graphs, compiles, operations, calls. What Dynamo makes behind a break counts as theirs."""

from __future__ import annotations

import threading
import types
from dataclasses import dataclass, field
from typing import Any

from optpass.backend.audit.calls import Tally
from optpass.backend.audit.events import FrameEvent
from optpass.backend.audit.observe import Graph
from optpass.reporting.audit.model import FunctionRecord

Key = tuple[str, int, str]


@dataclass
class _Entry:
    """One function as it is gathered."""

    key: Key
    graphs: int = 0
    compiles: int = 0
    broken: bool = False
    eager: bool = False
    compile_s: float = 0.0
    ops: dict[int, int] = field(default_factory=dict)
    guards: dict[int, float] = field(default_factory=dict)
    held: list[object] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


class FunctionCollector:
    """Adds up frames and calls per function.

    Args:
        observe: have one call of each broken function observed, for its share of operations in graphs.
    """

    def __init__(self, *, observe: bool = False) -> None:
        self._observe = observe
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}
        self._graphs: dict[tuple[int, str], Graph] = {}

    def on_frame(self, event: FrameEvent) -> None:
        """Count a frame that was compiled, or that broke."""
        code, origin = event.code, event.origin
        broken = any(raw.stack for raw in event.breaks)  # without a stack: a generator, run by eager code
        if code is None or origin is None:
            return
        if not (event.compiled or broken):
            self._left_alone(origin)
            return
        with self._lock:
            entry = self._entry(origin)
            entry.graphs += len(event.graphs)
            entry.compiles += event.compiled and not event.resumed
            entry.broken |= bool(event.breaks) or not event.compiled
            entry.compile_s += event.seconds
            if event.compiled:
                ops = event.graphs[-1].ops if event.graphs else 0
                entry.held.append(code)  # so that its id stays its own
                entry.ops[id(code)] = ops
                entry.guards[id(code)] = float(event.guard_us or 0.0)
                self._note_graphs(event.namespace, event.compiled_names, ops)
            if self._observe:
                self._ask()

    def _left_alone(self, origin: types.CodeType) -> None:
        """Dynamo compiles nothing of it: if it is what was given to torch.compile, its calls run eager from here on."""
        with self._lock:
            entry = self._entries.get(_key(origin))
            if entry is not None and entry.tally.graphs is not None:
                entry.eager = True
                self._ask()

    def tally(self, code: types.CodeType) -> Tally:
        """Where calls of a function are counted."""
        with self._lock:
            entry = self._entry(code)
            if self._observe:
                entry.tally.graphs = self._known_graphs
                self._ask()
            return entry.tally

    def _known_graphs(self) -> tuple[Graph, ...]:
        with self._lock:
            return tuple(self._graphs.values())

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
        key = _key(code)
        return self._entries.setdefault(key, _Entry(key))

    def _note_graphs(self, namespace: dict[str, Any] | None, names: tuple[str, ...], ops: int) -> None:
        if namespace is not None and self._observe:
            for name in names:
                self._graphs[id(namespace), name] = Graph(namespace, name, ops)

    def _ask(self) -> None:
        """Ask for one call of each function that calls run through, if anything is broken that they may reach."""
        if any(entry.broken or entry.eager for entry in self._entries.values()):
            for entry in self._entries.values():
                entry.tally.wanted = entry.tally.observed is None and entry.tally.graphs is not None


def _key(code: types.CodeType) -> Key:
    return code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name)


def _record(entry: _Entry) -> FunctionRecord:
    # A decorator's wrapper may be around several functions: then it is shown as what it is.
    shown = {_key(code) for code in tuple(entry.tally.shown)}
    file, line, function = shown.pop() if len(shown) == 1 else entry.key
    captured = sum(entry.ops.values())
    total = captured if entry.compiles and not entry.broken else None
    observed = entry.tally.observed or entry.tally.observed_once
    if observed is not None:
        captured, total = observed.captured, observed.captured + observed.eager
    return FunctionRecord(
        file=file,
        line=line,
        function=function,
        graphs=entry.graphs,
        compiles=entry.compiles,
        ops_captured=captured,
        ops_total=total,
        compile_s=entry.compile_s,
        t_first_s=entry.tally.first_s,
        t_steady_s=entry.tally.median(),
        calls=entry.tally.calls,
        guard_us=sum(entry.guards.values()) if entry.guards else None,
    )
