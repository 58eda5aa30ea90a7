"""Times calls of compiled functions from outside, as Dynamo is switched on for a call and back behind it.

Compiled functions stay the objects they are: nothing is wrapped, also those are timed that were made before. What runs
here runs twice at every call, so it does little: no locks, no events, one lookup by the identity of the callback. Once
enough calls were timed it asks to be left out, until something is compiled again.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import nn

from optpass.backend.audit.events import FrameEvent
from optpass.backend.audit.locations import code_of
from optpass.backend.audit.observe import OBSERVER, Graph, Observed, Window
from optpass.backend.compat import audit as dynamo
from optpass.backend.compat.audit_frames import is_compiled

_DEEPEST = 100
#: Steady calls of a function that are enough for a median, and calls in a row of such functions that are enough of all.
ENOUGH = 64


class Tally:
    """Calls of one function, for one listener.

    Attributes:
        calls: calls from outside that were timed.
        first_s: seconds of the first, compile included.
        observed: operations of one call in which nothing was compiled, where that was asked for.
        observed_once: the same of the latest call, where something was compiled in it.
        shown: the functions inside of its decorators.
        wanted: whether the next call is to be observed; see `observe`.
        graphs: gives the graphs that are known by then; None: nobody asks for operations.
        every_call: count them all, rather than until there are enough.
    """

    every_call = False

    __slots__ = ("calls", "first_s", "graphs", "observed", "observed_once", "shown", "steady", "wanted")

    def __init__(self) -> None:
        self.calls = 0
        self.first_s: float | None = None
        self.steady: deque[float] = deque(maxlen=2 * ENOUGH)
        self.shown: set[types.CodeType] = set()
        self.observed: Observed | None = None
        self.observed_once: Observed | None = None
        self.wanted = False
        self.graphs: Callable[[], tuple[Graph, ...]] | None = None

    def median(self) -> float | None:
        """Median of calls in which nothing was compiled; None where there was none."""
        return statistics.median(tuple(self.steady)) if self.steady else None


class Teller(Protocol):
    """Who has tallies."""

    def tally(self, code: types.CodeType) -> Tally: ...


class _Call:
    """A call under way.

    Attributes:
        frame: of the compiled function's entry.
        tallies: where it counts.
        code: of the function that was given to torch.compile.
        started: frames that this thread had begun to compile before.
        error: what was being handled when it began: another one at its end is raised out of it.
    """

    __slots__ = ("begin", "code", "error", "frame", "started", "tallies", "window")

    def __init__(self, frame: types.FrameType, tallies: tuple[Tally, ...], code: Any, started: int) -> None:
        self.frame, self.tallies, self.code, self.started = frame, tallies, code, started
        self.error = sys.exception()
        self.window: Window | None = None
        self.begin = 0.0


class _Local(threading.local):
    """This thread's calls, the innermost last, and how many frames it has begun to compile."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.started = 0


class CallWatcher:
    """ENTER_COMPILED: called as a compiled function switches Dynamo on, and again as it switches it back.

    Args:
        rest: called when enough calls were timed.
    """

    def __init__(self, rest: Callable[[], None]) -> None:
        self.local = _Local()
        self._rest = rest
        self._in_a_row = 0
        self._tellers: tuple[Teller, ...] = ()
        self._known: dict[int, tuple[Any, tuple[Tally, ...], Any]] = {}

    def tell(self, tellers: tuple[Teller, ...]) -> None:
        """Count calls for these from now on."""
        self._tellers = tellers
        self._known = {}
        self._in_a_row = 0

    def quick(self, callback: Any, frame: types.FrameType) -> None:
        """Dynamo is switched to `callback` by a compiled function's entry, whose frame this is."""
        local = self.local
        calls = local.calls
        if calls and calls[-1].frame is frame:
            end = time.perf_counter()
            call = calls.pop()
            self._file(call, end - call.begin, local.started - call.started)
        elif any(call.frame is frame for call in calls):  # an inner call never came back this way
            while _dropped(calls.pop()).frame is not frame:
                pass
        elif callback and len(calls) < _DEEPEST:
            while calls and not _is_below(frame, calls[-1].frame):
                _dropped(calls.pop())
            known = self._known.get(id(callback)) or self._look_up(callback, frame)
            tallies = known[1]
            if tallies:
                call = _Call(frame, tallies, known[2], local.started)
                for tally in tallies:
                    if tally.wanted and tally.graphs is not None and _enters(frame, callback):
                        call.window = OBSERVER.begin(tally.graphs())
                        break
                calls.append(call)
                call.begin = time.perf_counter()

    def compiled(self, event: FrameEvent) -> None:
        """A frame was compiled, or given up. What the call does with it is what its function does: it is observed too.

        The first frame of a call is looked at before it runs, so that nothing of the call is missed.
        """
        made = event.graphs[-1].ops if event.graphs else 0
        OBSERVER.go_on([Graph(event.namespace, name, made) for name in event.compiled_names] if event.namespace else ())
        call = self.local.calls[-1] if self.local.calls else None
        if call is None or call.window is not None or self.local.started != call.started + 1:
            return
        own = event.origin is call.code
        if not _is_below(sys._getframe(1), call.frame):
            return
        if (own and event.compiled and not event.breaks) or (not own and is_compiled(call.code)):
            return  # all of it is in this graph; or it was compiled before, and has run in part
        for tally in call.tallies:
            if tally.graphs is not None and tally.observed is None:
                call.window = OBSERVER.begin(tally.graphs())
                return

    def _file(self, call: _Call, seconds: float, compiles: int) -> None:
        if call.window is not None:
            raised = sys.exception() is not call.error  # then it has not come to its end
            OBSERVER.end(call.window, None if raised else partial(_observed, call.tallies, compiles > 0))
        self._in_a_row += 1
        for tally in call.tallies:
            if tally.every_call or len(tally.steady) < ENOUGH:
                self._in_a_row = 0
            tally.calls += 1
            if tally.first_s is None:
                tally.first_s = seconds
            elif not compiles and call.window is None:
                tally.steady.append(seconds)
        if self._in_a_row >= ENOUGH:
            self._rest()

    def _look_up(self, callback: Any, frame: types.FrameType) -> tuple[Any, tuple[Tally, ...], Any]:
        """The function's tallies. Its frame's variables are read once per `torch.compile`: that is slow."""
        function = frame.f_locals.get("fn")
        inside = dynamo.inside_own_frame(function)
        function = _called(function)
        code = code_of(inside) if inside is not None else getattr(function, "__code__", None)
        found: tuple[Tally, ...] = ()
        if isinstance(code, types.CodeType):
            found = tuple(teller.tally(code) for teller in self._tellers)
            for tally in found:
                tally.shown.add(getattr(_meant(function), "__code__", code))
        known = self._known[id(callback)] = callback, found, code  # the callback is held, so that its id stays its own
        return known


def _observed(tallies: tuple[Tally, ...], compiled: bool, observed: Observed | None) -> None:
    """What was counted of a call of these, in which something was compiled or not; None: their calls are too long."""
    for tally in tallies:
        if observed is None:
            tally.wanted, tally.graphs = False, None
        elif not compiled:
            tally.observed, tally.wanted = observed, False
        elif observed.captured + observed.eager:
            tally.observed_once = observed


def _dropped(call: _Call) -> _Call:
    """A call whose end was not told."""
    if call.window is not None:
        OBSERVER.end(call.window, None)
    return call


def _is_below(frame: types.FrameType | None, above: types.FrameType) -> bool:
    """Whether a frame was called from another one, which then is still running."""
    while frame is not None and frame is not above:
        frame = frame.f_back
    return frame is not None


def _enters(frame: types.FrameType, callback: Any) -> bool:
    """Whether an entry switches Dynamo on, and not back to what it was in the call around: that has no end."""
    return frame.f_locals.get("prior") is not callback


def _called(function: Any) -> Any:
    """The function whose frame Dynamo compiles: a module's `forward` for its call."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(function, "__name__", "") != "forward":
        return owner.forward
    return function


def _meant(function: Any) -> Any:
    """The function that the user would name: inside of decorators and of the frame that Dynamo puts around some."""
    for _ in range(_DEEPEST):
        inner = getattr(function, "__wrapped__", None) or dynamo.inside_own_frame(function)
        if inner is None:
            break
        function = inner
    return _called(function)
