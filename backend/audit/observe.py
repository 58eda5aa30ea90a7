"""Calls of broken functions, observed: how many of their tensor operations ran in graphs, and how many eager.

Torch's own profiler tells; nothing is added to the program but names around the compiled graphs, for these calls.
While something is compiled it rests, so that a call that compiles is counted as one that does not: by what runs of it.
Operations of the backward count on neither side.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from optpass.backend.compat import disable_dynamo
from optpass.backend.compat.audit_operations import Event, OperationLog, fast_marker

_MARK, _OPEN, _CLOSE = "optpass_graph:", "optpass_open:", "optpass_close:"
_FRAME = "Torch-Compiled Region"
_BACKWARD = ("autograd::engine::evaluate_function", "CompiledFunctionBackward")
#: Calls of graphs that one observed call may make, and how many in more than so many seconds.
_MOST, _MANY, _LONG = 1024, 128, 5.0
#: What torch's profiler leaves out of its own tables.
_NOT_OPS = frozenset({"aten::is_leaf", "aten::output_nr", "aten::_version"})


@dataclass(frozen=True)
class Observed:
    """Tensor operations of one call: of the graphs that ran, and outside of them."""

    captured: int
    eager: int


@dataclass(frozen=True)
class Graph:
    """A compiled graph where Dynamo's code finds it: a global of the user's module."""

    namespace: dict[str, Any]
    name: str
    ops: int


#: What a call is told to: its counts, or None.
Tell = Callable[[Observed | None], None]


class Window:
    """One call that is observed: it begins with the log, or at a mark in it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.captured = self.eager = 0
        self.around = 0
        self.tell: Tell | None = None


class Observation:
    """The calls of one thread that are observed, calls inside of the first too. Made by `Observer`."""

    def __init__(self) -> None:
        self.log = OperationLog()
        self._windows: list[Window] = []
        self._ran, self._began, self._over = 0, time.perf_counter(), False
        self._marked: list[tuple[Graph, Any, Any]] = []

    def open(self, graphs: Iterable[Graph]) -> Window | None:
        """Observe another call from here on; None where the log cannot be had."""
        if not self._windows:
            if not self.log.start():
                return None
        elif not self.log.running:
            return None
        window = Window(str(len(self._windows)) if self._windows else "")
        self._windows.append(window)
        if window.mark:
            _note(_OPEN + window.mark)
        self.mark(graphs)
        return window

    def end(self, window: Window, tell: Tell | None) -> bool:
        """A call is over; whether it was the first one, and with it the log. Its counts are told by then."""
        window.tell = tell
        if window is not self._windows[0]:
            _note(_CLOSE + window.mark)
            return False
        threads = self.close()
        if threads is None:
            return True
        if not self._over:
            _count(threads, self._windows)
        for known in self._windows:
            if known.tell is not None:
                known.tell(None if self._over else Observed(known.captured, known.eager))
        return True

    def close(self) -> list[list[Event]] | None:
        """Put everything back; what was logged."""
        threads = self.log.stop()
        for graph, original, marked in self._marked:
            if graph.namespace.get(graph.name) is marked:
                graph.namespace[graph.name] = original
        self._marked = []
        return threads

    def mark(self, graphs: Iterable[Graph]) -> None:
        """Have the log show these graphs under a name of ours."""
        for graph in graphs:
            original = graph.namespace.get(graph.name)
            if callable(original) and not any(original is marked for _, _, marked in self._marked):
                marked = _marked(original, f"{_MARK}{graph.ops}", self._runs)
                graph.namespace[graph.name] = marked
                self._marked.append((graph, original, marked))

    def _runs(self) -> None:
        """A graph is called. A whole training may be one call: then no more of it is kept."""
        self._ran += 1
        if self._ran < _MANY or self._over:
            return
        if self._ran >= _MOST or time.perf_counter() - self._began > _LONG:
            self._over = True
            self.log.rest()


class Observer:
    """The process's one observation at a time: graphs are marked for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._current: Observation | None = None

    def begin(self, graphs: Iterable[Graph]) -> Window | None:
        """Observe a call of this thread from here on; None where another thread is observed, or the program profiles
        itself, or torch has no such profiler.
        """
        here = threading.get_ident()
        with self._lock:
            if self._current is not None and self._thread != here:
                return None
            current = self._current or Observation()
            self._current, self._thread = current, here
        window = None
        try:
            window = current.open(graphs)
        finally:
            if window is None and not current.log.running and not current._windows:
                self._drop()
        return window

    def end(self, window: Window, tell: Tell | None) -> None:
        """The call is over. Its counts are told when the first one that is observed is over; None: they are not wanted.

        None is told of a call that is too long. Nothing is told where the program began to profile.
        """
        current = self._current
        if current is None or window not in current._windows:
            return
        last = True
        try:
            last = current.end(window, tell)
        finally:
            if last:
                self._drop()

    def rest(self) -> None:
        """This thread begins to compile."""
        if self._current is not None and self._thread == threading.get_ident():
            self._current.log.rest()

    def go_on(self, graphs: Iterable[Graph]) -> None:
        """It has compiled these."""
        if self._current is not None and self._thread == threading.get_ident():
            self._current.log.go_on()
            self._current.mark(graphs)

    def _drop(self) -> None:
        with self._lock:
            self._current, self._thread = None, None

    def after_fork(self) -> None:
        """In a forked child: the call that is observed, if it is this thread's, goes on without."""
        current, self._current = self._current, None
        ours, self._thread = self._thread == threading.get_ident(), None
        self._lock = threading.Lock()
        if current is not None and ours:
            current.close()


OBSERVER = Observer()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OBSERVER.after_fork)


def _note(name: str) -> None:
    with fast_marker(name):
        pass


def _marked(function: Callable[..., Any], name: str, runs: Callable[[], None]) -> Callable[..., Any]:
    """`function` under a name that the profiler sees; never traced, since it is called where Dynamo is on."""

    def optpass_graph(*args: Any, **kwargs: Any) -> Any:
        runs()
        with fast_marker(name):
            return function(*args, **kwargs)

    return disable_dynamo(optpass_graph)


class _Frame:
    """One run of what Dynamo made of a frame. In front of its graph it only wraps inputs: nothing of the user's."""

    def __init__(self, key: tuple[int, int], windows: list[Window]) -> None:
        self.key = key
        self._eager = {window: window.eager for window in windows}

    def graph_begins(self) -> None:
        """What was taken for eager operations of the user was not."""
        for window, eager in self._eager.items():
            window.eager = eager
        self._eager = {}

    def others_run(self) -> None:
        """Another frame runs inside, so that the graph of this one, if there is any, ran before."""
        self._eager = {}


def _count(threads: list[list[Event]], windows: list[Window]) -> None:
    """Tensor operations of each call, in graphs and outside; what is part of another is not counted.

    What ends in another thread, as collectives do, has nothing inside of it.
    """
    by_mark = {window.mark: window for window in windows}
    ended = {key for events in threads for kind, _, key in events if kind == "pop"}
    for events in threads:
        here = {key for kind, _, key in events if kind == "pop"}
        around: set[tuple[int, int]] = set()
        opened, frames = [windows[0]], list[_Frame]()
        windows[0].around = 0
        for kind, name, key in events:
            if kind == "pop":
                around.discard(key)
                frames = [frame for frame in frames if frame.key != key]
            elif kind == "push" and name.startswith(_FRAME):
                for frame in frames:
                    frame.others_run()
                frames.append(_Frame(key, opened))
            elif kind == "push" and name.startswith(_OPEN):
                opened.append(by_mark[name.removeprefix(_OPEN)])
                opened[-1].around = len(around)
            elif kind == "push" and name.startswith(_CLOSE):
                opened = [window for window in opened if window.mark != name.removeprefix(_CLOSE)]
            elif kind == "push":
                marked, op = name.startswith(_MARK), _is_op(name)
                if marked and frames:
                    frames[-1].graph_begins()
                for window in opened if marked or op else ():
                    if window.around == len(around):
                        window.captured += int(name.removeprefix(_MARK)) if marked else 0
                        window.eager += op
                if (marked or op or name.startswith(_BACKWARD)) and (key in here or key not in ended):
                    around.add(key)


def _is_op(name: str) -> bool:
    return (
        "::" in name and " " not in name and not name.startswith(("autograd::", "profiler::")) and name not in _NOT_OPS
    )
