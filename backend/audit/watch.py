"""The process's one watcher of Dynamo: turns what hook points tell into events and gives them to whoever listens.

Hooks are installed while somebody listens. Per thread it keeps the frame that is being compiled, so that breaks and
graphs find the frame they belong to.
"""

from __future__ import annotations

import os
import threading
import time
import types
from typing import Any, Protocol

from optpass.backend.audit import calls, capture, halves
from optpass.backend.audit.events import FrameEvent, GraphEvent, RawBreak
from optpass.backend.audit.fallback import TraceReader
from optpass.backend.audit.locations import code_of
from optpass.backend.audit.observe import OBSERVER
from optpass.backend.compat import audit as dynamo
from optpass.backend.compat.data_parallel import handed_on_by
from optpass.backend.compat.hooks import Args, HookPoint, Kwargs, Watcher


class Listener(Protocol):
    """Who gets events; called in the thread that compiles or calls."""

    def on_frame(self, event: FrameEvent) -> None: ...

    def tally(self, code: types.CodeType) -> calls.Tally: ...


class _Local(threading.local):
    """What this thread is compiling.

    Attributes:
        frames: frames being compiled, the innermost last.
        modules: module path by place, for the frame being compiled.
    """

    def __init__(self) -> None:
        self.frames: list[FrameEvent] = []
        self.modules: dict[capture.Key, capture.Seen] = {}


class _Frames:
    """CONVERT_FRAME: one attempt to compile a frame."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        local = self.watch.local
        code: types.CodeType = args[1].f_code
        inside = dynamo.callable_inside(args[1])
        origin = code_of(inside) if inside is not None else None
        origin = origin or dynamo.resumed_from(code) or code
        event = FrameEvent(
            code, origin, dynamo.is_resume(code), dynamo.backend_name(args[0]), dynamo.backend_options(args[0]),
            wraps=handed_on_by(inside),
        )  # fmt: skip
        local.frames.append(event)
        self.watch.calls.local.started += 1
        OBSERVER.rest()
        if self.watch.resting:
            self.watch.time_calls()
        local.modules = {}
        return event, time.perf_counter()

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        event, start = token
        event.seconds = time.perf_counter() - start
        frames = self.watch.local.frames
        while frames and frames.pop() is not event:
            pass
        try:
            capture.finish(event, args[1], result, error)
            event.left = error is not None and not dynamo.raises(args[0], error)
            if error is not None and dynamo.is_break(error) and not getattr(error, "logged", False):
                event.breaks.append(capture.raw_break(error, self.watch.local.modules, args[0]))
            self.watch.tell_frame(event)
        finally:
            self.watch.calls.compiled(event)


class _Breaks:
    """LOG_GRAPH_BREAK: a break that Dynamo handles."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        error = kwargs.get("exc", args[3] if len(args) > 3 else None)
        reason = kwargs.get("reason", args[2] if len(args) > 2 else "")
        if error is None or getattr(error, "logged", False):
            return
        self.watch.file_break(capture.logged_break(error, str(reason), self.watch.local.modules))

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        return None


class _Places:
    """UNSUPPORTED and USER_ERROR: where the innermost traced frame stands; later, Dynamo has left it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        return None

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        if error is None:
            capture.remember(self.watch.local.modules)


class _Graphs:
    """CALL_COMPILER: a graph on its way to the backend, which may change it: it is looked at before."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        gm: Any = kwargs.get("gm", args[1] if len(args) > 1 else None)
        frames = self.watch.local.frames
        beside = bool(frames) and (frames[-1].resumed or bool(frames[-1].breaks))
        half = halves.half_of(args[0], gm) if beside and self.watch.in_detail else None
        return *capture.size_of(gm), half, time.perf_counter()

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        ops, output_bytes, half, start = token
        frames = self.watch.local.frames
        if error is None and frames:
            frames[-1].graphs.append(GraphEvent(ops, output_bytes, time.perf_counter() - start, half))


class Watch:
    """Listeners and hooks.

    Attributes:
        problems: hook points that could not be installed when somebody last began to listen.
        resting: calls are not timed for the moment: there were enough.
        fallback: whether breaks are read from the trace log.
    """

    def __init__(self) -> None:
        self.local = _Local()
        self.problems: dict[str, str] = {}
        self._lock = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._timed: tuple[Listener, ...] = ()
        self.calls = calls.CallWatcher(self._rest)
        self.resting = False
        self._hooks: tuple[tuple[HookPoint, Watcher], ...] = (
            (dynamo.CONVERT_FRAME, _Frames(self)),
            (dynamo.LOG_GRAPH_BREAK, _Breaks(self)),
            (dynamo.UNSUPPORTED, _Places(self)),
            (dynamo.USER_ERROR, _Places(self)),
            (dynamo.CALL_COMPILER, _Graphs(self)),
        )
        self._trace = TraceReader(self.file_break)

    @property
    def fallback(self) -> bool:
        """Whether breaks are read from the trace log, for want of a hook."""
        return dynamo.LOG_GRAPH_BREAK.observes in self.problems and dynamo.trace_log() is not None

    @property
    def in_detail(self) -> bool:
        """Whether somebody wants what costs more than a look: calls timed, graphs beside breaks kept."""
        return bool(self._timed)

    def listen(self, listener: Listener, *, time_calls: bool) -> None:
        """Give events to `listener` from now on; calls are timed only where it asks for that."""
        with self._lock:
            if not self._listeners:
                self._install()
            self._listeners = (*self._listeners, listener)
            if time_calls:
                self._timed = (*self._timed, listener)
                self.time_calls()

    def leave(self, listener: Listener) -> None:
        """Give it no more events; hooks go when nobody listens."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            self._timed = tuple(known for known in self._timed if known is not listener)
            self.calls.tell(self._timed)
            if not self._timed:
                dynamo.ENTER_COMPILED.remove_quick(self.calls.quick)
            if not self._listeners:
                for point, watcher in self._hooks:
                    point.remove(watcher)
                self._trace.stop()

    def time_calls(self) -> None:
        """Time calls from now on, for those who asked for it."""
        with self._lock:
            dynamo.ENTER_COMPILED.remove_quick(self.calls.quick)
            self.resting = False
            self.calls.tell(self._timed)
            if self._timed and (problem := dynamo.ENTER_COMPILED.add_quick(self.calls.quick)) is not None:
                self._lose(dynamo.ENTER_COMPILED, problem)

    def _rest(self) -> None:
        with self._lock:
            dynamo.ENTER_COMPILED.remove_quick(self.calls.quick)
            self.resting = bool(self._timed)

    def _install(self) -> None:
        self.problems = {}
        for point, watcher in self._hooks:
            if (problem := point.add(watcher)) is not None:
                self._lose(point, problem)
        what = dynamo.LOG_GRAPH_BREAK.observes
        if what in self.problems and not self._trace.start():
            self.problems[what] = (
                f"{dynamo.LOG_GRAPH_BREAK.problem()}, and Dynamo's trace log as well: no breaks are known"
            )

    def _lose(self, point: HookPoint, problem: str) -> None:
        self.problems[point.observes] = f"{problem}: {point.loses}"

    def file_break(self, raw: RawBreak) -> None:
        """A break of the frame that this thread compiles; told at once where frames cannot be watched."""
        if self.local.frames:
            self.local.frames[-1].breaks.append(raw)
        else:
            self.tell_frame(FrameEvent(None, None, breaks=[raw]))

    def tell_frame(self, event: FrameEvent) -> None:
        """Give a frame's event to every listener."""
        for listener in self._listeners:
            listener.on_frame(event)

    def after_fork(self) -> None:
        """In a forked child: nobody listens there yet, and locks may be held by threads not here."""
        self.__init__()  # type: ignore[misc]


WATCH = Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WATCH.after_fork)
