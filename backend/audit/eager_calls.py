"""Calls that run eager although the user asked to compile: what Dynamo decided for good, and how often it counts since.

A decision for good would leave nothing to count: Dynamo is asked again at every call, and its decision repeated for it.
That costs a call of a healthy function nothing, and a call of these some microseconds; behind `MOST` calls the
decision is put in force. What runs, and how, is the same throughout.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from optpass.backend.audit import silent_reasons
from optpass.backend.audit.guards import Modes
from optpass.backend.audit.locations import code_of
from optpass.backend.audit.silent_reasons import Attempt, Verdict
from optpass.backend.compat import audit_frames as frames
from optpass.backend.compat import audit_guards as guards
from optpass.backend.compat.hooks import Args, Kwargs

MOST = 10_000


@dataclass(frozen=True)
class EagerEvent:
    """One call that ran eager.

    Attributes:
        verdict: why; the same object for every call of the code.
        countable: whether calls that follow are told.
        last: the last call that is told; later ones are not counted any more.
    """

    verdict: Verdict
    countable: bool = True
    last: bool = False


class Listener(Protocol):
    """Who is told; in the thread that calls."""

    def on_eager(self, event: EagerEvent) -> None: ...


@dataclass
class _Refused:
    """A code object that Dynamo compiles no more.

    Attributes:
        state: Dynamo's own dict for the code; another one means that Dynamo has forgotten its decision.
        answer: its decision, repeated.
    """

    code: weakref.ref[types.CodeType]
    state: Any
    refusal: str
    answer: Any
    verdict: Verdict
    calls: int = 1

    def in_force(self) -> bool:
        """Whether Dynamo still has the state: `torch._dynamo.reset` throws it away."""
        return sys.getrefcount(self.state) > 2


class _Local(threading.local):
    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.modes: Modes | None = None


class Frames:
    """The process's one watcher of Dynamo's decisions; installed while somebody listens."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._local = _Local()
        self._lock = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._refused: dict[int, _Refused] = {}
        self._seen: dict[int, tuple[weakref.ref[types.CodeType], float]] = {}
        self._ticks = itertools.count(1)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` from now on."""
        with self._lock:
            if not self._listeners:
                found = {frames.FRAME: frames.FRAME.listen(self), guards.COMPILE: guards.COMPILE.add(self)}
                self.problems = [f"{problem}: {point.loses}" for point, problem in found.items() if problem is not None]
            self._listeners = (*self._listeners, listener)

    def leave(self, listener: Listener) -> None:
        """Tell it no more; when nobody listens, Dynamo's decisions are put in force."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            if self._listeners:
                return
            frames.FRAME.listen(None)
            guards.COMPILE.remove(self)
        self.pause()
        self._refused, self._seen = {}, {}

    def pause(self) -> None:
        """Put Dynamo's decisions in force: calls are not counted until `resume`."""
        self._each(frames.apply)

    def resume(self) -> None:
        """Count calls again."""
        self._each(frames.ask_again)

    def _each(self, change: Callable[[types.CodeType, str], None]) -> None:
        with self._lock:
            refused = list(self._refused.values())
        for known in refused:
            code = known.code()
            if code is not None and known.in_force():
                change(code, known.refusal)

    def after_fork(self) -> None:
        """In a forked child: nobody listens there, and another thread of the parent may have held the lock."""
        self._lock = threading.RLock()
        self._listeners = ()

    def tick(self) -> int:
        """A number that grows: what is noted behind it has a larger one."""
        return next(self._ticks)

    def note(self, code: types.CodeType, *, again: bool = True) -> None:
        """The code was called through `torch.compile`; `again`: if it is called once more, that will be seen too."""
        key = id(code)
        known = self._seen.get(key)
        made = known[0] if known is not None else weakref.ref(code, lambda _: self._seen.pop(key, None))
        self._seen[key] = made, self.tick() if again else math.inf

    def has_seen(self, code: types.CodeType, since: int) -> bool:
        """Whether Dynamo was asked about the code behind that tick, or may not have been asked when it was called."""
        known = self._seen.get(id(code))
        return known is not None and known[0]() is code and known[1] > since

    def modes_of_call(self) -> Modes | None:
        """Torch function modes of the call that this thread compiles: Dynamo switches them off meanwhile."""
        return self._local.modes

    def answer(self, frame: Any, state: Any) -> Any:
        """Dynamo's earlier decision on this code, counted; None to let it decide."""
        code = frame.f_code
        self.note(code)
        known = self._refused.get(id(code))
        if known is not None and not (known.refusal == "run only" and frames.isolated()):
            if known.code() is code and known.state is state:
                return self._again(known)
            self._refused.pop(id(code), None)
        self._local.modes = guards.active_function_modes()
        self._local.attempts.append(Attempt())
        return None

    def _again(self, known: _Refused) -> Any:
        with self._lock:
            known.calls += 1
            last = known.calls >= MOST
            if last:
                code = known.code()
                self._refused.pop(id(code), None)
        self._tell(EagerEvent(known.verdict, last=last))
        return frames.final(known.answer, known.refusal) if last else known.answer

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        """A compile of a frame begins (`compat.audit_guards.COMPILE`)."""
        call = guards.compile_call(args, kwargs)
        wrapped = guards.wrapped_callable(call)
        code = code_of(wrapped) if wrapped is not None else None
        if code is not None:
            self.note(code)
        return call

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        """It has ended."""
        if not self._local.attempts:
            return
        attempt = self._local.attempts[-1]
        attempt.compiled, attempt.error, attempt.call = True, error, token
        attempt.look()

    def decided(self, frame: Any, state: Any, result: Any, error: BaseException | None) -> None:
        """Dynamo has decided on a frame."""
        attempt = self._local.attempts.pop() if self._local.attempts else Attempt()
        self._local.modes = None
        refusal = frames.refuses(result)
        if refusal is None:
            attempt.forget()
            return
        verdict = silent_reasons.judge(frame, result, attempt)
        attempt.forget()
        countable = verdict is not None and self._keep_asking(frame, state, result, refusal, verdict)
        self.note(frame.f_code, again=countable)
        if verdict is None:
            return
        self._tell(EagerEvent(verdict, countable=countable))

    def _keep_asking(self, frame: Any, state: Any, result: Any, refusal: str, verdict: Verdict) -> bool:
        code = frame.f_code
        if frames.isolated() or state is None:
            return False  # a decision for one region must not reach the others
        if refusal == "skip" and not frames.retire_entries(code):
            return False
        key = id(code)
        forget = weakref.ref(code, lambda _: self._refused.pop(key, None))
        answer = frames.keep_asking(result, refusal)
        self._refused[key] = _Refused(forget, state, refusal, answer, verdict)
        return True

    def _tell(self, event: EagerEvent) -> None:
        for listener in self._listeners:
            listener.on_eager(event)


FRAMES = Frames()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FRAMES.after_fork)
