"""Functions given to `torch.compile` that never reach Dynamo: switched off by environment, argument or stance, or never
called.
"""

from __future__ import annotations

import logging
import os
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from optpass.backend.audit.eager_calls import FRAMES, EagerEvent
from optpass.backend.audit.locations import code_of, code_place, is_torch
from optpass.backend.audit.silent_reasons import Verdict, is_entry
from optpass.backend.compat import audit_entry as entry
from optpass.backend.compat import audit_frames as frames
from optpass.backend.compat.hooks import Args, Kwargs

log = logging.getLogger(__name__)

_EAGER = ("force_eager", "eager_on_recompile")
_FACE = ("torch/__init__.py", "torch/_dynamo/eval_frame.py", "torch/nn/modules/module.py", "torch/compiler/__init__.py")


class Listener(Protocol):
    """Who is told."""

    def on_eager(self, event: EagerEvent) -> None: ...


@dataclass(frozen=True)
class _Given:
    """A function that was given to `torch.compile`, and where."""

    code: weakref.ref[types.CodeType]
    place: tuple[str, int, str]
    line: str
    tick: int


class _Handed:
    """Watches `torch.compile` hand out a compiled function, or give it back as it is."""

    def __init__(self, outside: Outside, *, compiled: bool) -> None:
        self.outside, self.compiled = outside, compiled

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        local = self.outside.local
        local.depth += 1  # for a module, torch compiles its call as well
        target = args[1] if len(args) > 1 else kwargs.get("fn")
        caller = _caller()
        if local.depth > 1 or target is None or caller is None or is_torch(caller.f_code):
            return
        (self.outside.compiled if self.compiled else self.outside.given_back)(target, caller)

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        self.outside.local.depth -= 1


class _Stance:
    """Watches `torch.compiler.set_stance`."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        if entry.raises_where_not_compiled(args[0]):
            FRAMES.pause()  # to count calls, Dynamo is asked about code that it would pass over

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        if error is None:
            caller = _caller()
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
            self.outside.stance_is(entry.stance_name(args[0]), where)
            if not entry.raises_where_not_compiled(args[0]):
                FRAMES.resume()


class _Calls:
    """Watches calls of compiled functions, while a stance keeps them eager."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        if args and args[0] not in (None, False):
            for frame in frames.frames_above(1):
                if (target := entry.called_function(frame)) is not None:
                    self.outside.called(target)
                    return

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        return None


class _Local(threading.local):
    """Of one thread: calls of torch's face under way, and the last call that may have run eager."""

    def __init__(self) -> None:
        self.depth = 0
        self.verdict: Verdict | None = None


def _inlined(translator: Any, _: types.FrameType) -> None:
    """Dynamo traces a function into the graph of one that calls it."""
    FRAMES.note(translator.f_code)


class Outside:
    """The process's one watcher of what never reaches Dynamo; installed while somebody listens."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._lock = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._given: dict[int, list[_Given]] = {}
        self._stance, self._where = "default", ""
        self.local = _Local()
        self._hooks = (
            (entry.COMPILED, _Handed(self, compiled=True)),
            (entry.NOT_COMPILED, _Handed(self, compiled=False)),
            (entry.SET_STANCE, _Stance(self)),
        )
        self._calls = _Calls(self)
        self._lookups = entry.Lookups(self.found)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` from now on."""
        with self._lock:
            if not self._listeners:
                told = [(point, point.add(watcher)) for point, watcher in self._hooks]
                told.append((entry.INLINED, entry.INLINED.add_quick(_inlined)))
                told.append((entry.ENTER, entry.ENTER.problem()))  # watched only while a stance is in force
                self.problems = [f"{problem}: {point.loses}" for point, problem in told if problem is not None]
            self._listeners = (*self._listeners, listener)
            self._given[id(listener)] = []
        self.stance_is(entry.stance(), self._where)

    def leave(self, listener: Listener) -> None:
        """Tell it no more."""
        self.flush()
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            self._given.pop(id(listener), None)
            if not self._listeners:
                for point, watcher in self._hooks:
                    point.remove(watcher)
                entry.INLINED.remove_quick(_inlined)
                self._watch_calls(False)

    def after_fork(self) -> None:
        """In a forked child: nobody listens there, and another thread of the parent may have held the lock."""
        self._lookups.stop()
        self.__init__()  # type: ignore[misc]

    def compiled(self, target: Any, caller: types.FrameType) -> None:
        """A compiled function was handed out."""
        code = code_of(target)
        if code is None:
            return
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        place = code_place(code)
        if is_torch(code):  # a module of torch's: the user's line is where it is compiled
            owner = getattr(target, "__self__", target)
            named = type(owner) if isinstance(owner, nn.Module) else owner
            name = getattr(named, "__qualname__", code.co_qualname)
            place = (caller.f_code.co_filename, caller.f_lineno, name)
        given = _Given(weakref.ref(code), place, where, FRAMES.tick())
        with self._lock:
            for known in self._given.values():
                known.append(given)

    def given_back(self, target: Any, caller: types.FrameType) -> None:
        """`torch.compile` gave back what it got."""
        code = code_of(target)
        if code is None:
            return
        if entry.disabled_by_environment():
            why = "The environment sets TORCHDYNAMO_DISABLE=1: torch.compile gives back what it gets."
            fix = "Unset TORCHDYNAMO_DISABLE."
        else:
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            why = f"torch.compile(disable=True) at {where} gives back what it gets."
            fix = "Leave `disable=True` out of the call of torch.compile."
        self._tell(EagerEvent(Verdict("compile disabled", code_place(code), why, fix), countable=False))

    def never_called(self, listener: Listener) -> list[Verdict]:
        """Functions compiled since `listener` began that nobody called."""
        self.flush()
        if frames.FRAME.problem() is not None or entry.INLINED.problem() is not None:
            return []  # in this torch, functions that were called look like those that were not
        found: dict[tuple[str, int, str], Verdict] = {}
        for given in self._given.get(id(listener), ()):
            code = given.code()
            if code is None or FRAMES.has_seen(code, given.tick) or frames.is_compiled(code):
                continue
            found[given.place] = Verdict(
                "not compiled",
                given.place,
                f"torch.compile was called for it at {given.line}, but what that returned was never called.",
                "Call what torch.compile returns (`model = torch.compile(model)`), or use `model.compile()`, which "
                "compiles in place; the original stays eager.",
            )
        return list(found.values())

    def stance_is(self, stance: str, where: str) -> None:
        """A stance is in force from now on."""
        self.flush()
        with self._lock:
            self._stance, self._where = stance, where
            self._watch_calls(stance in _EAGER and bool(self._listeners))

    def _watch_calls(self, watch: bool) -> None:
        entry.ENTER.remove(self._calls)
        self._lookups.stop()
        if watch:
            entry.ENTER.add(self._calls)
            if self._stance == "eager_on_recompile":
                self._lookups.start()

    def called(self, target: Any) -> None:
        """A compiled function is called under a stance."""
        self.flush()
        code = code_of(target)
        if code is None:
            return
        FRAMES.note(code)
        place, where = code_place(code), f" at {self._where}" if self._where else ""
        reason = f"torch.compiler.set_stance({self._stance!r}){where} is in force"
        if self._stance == "force_eager":
            verdict = Verdict("compile disabled", place, f"{reason}: compiled functions run eager.", _FORCE_EAGER)
            self._tell(EagerEvent(verdict))
            return
        verdict = Verdict(
            "compile disabled", place, f"{reason}: calls that match no compiled code run eager.", _ON_RECOMPILE
        )
        self.local.verdict = verdict  # eager unless compiled code is found

    def found(self) -> None:
        """A call found compiled code."""
        try:
            if self.local.verdict is not None and is_entry():
                self.local.verdict = None
        except Exception:  # called by Dynamo before the user's function: nothing may come out of it
            log.debug("a lookup could not be judged", exc_info=True)

    def flush(self) -> None:
        """Count the last call of this thread, if it found no compiled code."""
        verdict = self.local.verdict
        if verdict is not None:
            self.local.verdict = None
            self._tell(EagerEvent(verdict))

    def _tell(self, event: EagerEvent) -> None:
        for listener in self._listeners:
            listener.on_eager(event)


_FORCE_EAGER = "Set the stance back to 'default', or use it as a context manager around what must run eager."
_ON_RECOMPILE = (
    "Run inputs of every kind once under the stance 'default', so that they are compiled, before this stance is set."
)


def _caller() -> types.FrameType | None:
    """The user's frame that called into torch's face."""
    for frame in frames.frames_above(1):
        name = frame.f_code.co_filename.replace("\\", "/")
        module = str(frame.f_globals.get("__name__", ""))
        if not name.endswith(_FACE) and not name.endswith("torch/_dynamo/decorators.py") and module not in _OURS:
            return frame
    return None


_OURS = ("optpass.backend.compat.hooks", __name__)
OUTSIDE = Outside()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OUTSIDE.after_fork)
