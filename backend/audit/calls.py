"""Times calls of compiled functions from outside, as Dynamo is switched on for a call and back behind it.

Compiled functions stay the objects they are: nothing is wrapped, also those are timed that were made before. What runs
here runs twice at every call, so it does little: no locks, no events, one lookup by the identity of the callback. Once
enough calls were timed it asks to be left out, until something is compiled again.
"""

from __future__ import annotations

import statistics
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from optpass.backend.audit.locations import code_of
from optpass.backend.audit.observe import Graph, Observation, Observed, begin
from optpass.backend.compat import audit as dynamo

_DEEPEST = 100
#: Steady calls of a function that are enough for a median, and calls in a row of such functions that are enough of all.
ENOUGH = 64


class Tally:
    """Calls of one function, for one listener.

    Attributes:
        calls: calls from outside that were timed.
        first_s: seconds of the first, compile included.
        observed: operations of one call, where that was asked for.
        shown: the functions inside of its decorators.
        wanted: what the next call is asked to observe; see `observe`.
        every_call: count them all, rather than until there are enough.
    """

    every_call = False

    __slots__ = ("calls", "first_s", "observed", "shown", "steady", "wanted")

    def __init__(self) -> None:
        self.calls = 0
        self.first_s: float | None = None
        self.steady: deque[float] = deque(maxlen=2 * ENOUGH)
        self.shown: set[types.CodeType] = set()
        self.observed: Observed | None = None
        self.wanted: tuple[Graph, ...] = ()

    def median(self) -> float | None:
        """Median of calls in which nothing was compiled; None where there was none."""
        return statistics.median(tuple(self.steady)) if self.steady else None


class Teller(Protocol):
    """Who has tallies."""

    def tally(self, code: types.CodeType) -> Tally: ...


class _Local(threading.local):
    """This thread's calls, the innermost last, and how many frames it has begun to compile.

    A call: entry frame, its tallies, frames begun before, observation, start.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
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
        self._known: dict[int, tuple[Any, tuple[Tally, ...]]] = {}

    def tell(self, tellers: tuple[Teller, ...]) -> None:
        """Count calls for these from now on."""
        self._tellers = tellers
        self._known = {}
        self._in_a_row = 0

    def quick(self, callback: Any, frame: types.FrameType) -> None:
        """Dynamo is switched to `callback` by a compiled function's entry, whose frame this is."""
        local = self.local
        calls = local.calls
        if calls and calls[-1][0] is frame:
            end = time.perf_counter()
            _, tallies, started, observation, start = calls.pop()
            self._file(tallies, end - start, local.started - started, observation)
        elif any(call[0] is frame for call in calls):  # an inner call never came back this way
            while calls.pop()[0] is not frame:
                pass
        elif callback and len(calls) < _DEEPEST:
            known = self._known.get(id(callback))
            tallies = known[1] if known is not None else self._tallies(callback, frame)
            if tallies:
                observation = None
                for tally in tallies:
                    if tally.wanted:
                        observation = begin(tally.wanted)
                        break
                calls.append((frame, tallies, local.started, observation, time.perf_counter()))

    def _file(self, tallies: tuple[Tally, ...], seconds: float, compiles: int, observation: Observation | None) -> None:
        observed = observation.end() if observation is not None else None
        self._in_a_row += 1
        for tally in tallies:
            if tally.every_call or len(tally.steady) < ENOUGH:
                self._in_a_row = 0
            tally.calls += 1
            if tally.first_s is None:
                tally.first_s = seconds
            elif not compiles and observation is None:
                tally.steady.append(seconds)
            if tally.wanted and not compiles and observed is not None:
                tally.observed, tally.wanted = observed, ()
        if self._in_a_row >= ENOUGH:
            self._rest()

    def _tallies(self, callback: Any, frame: types.FrameType) -> tuple[Tally, ...]:
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
        self._known[id(callback)] = (callback, found)  # the callback is held, so that its id stays its own
        return found


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
