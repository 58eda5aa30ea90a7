"""Times calls of compiled functions from outside, as Dynamo is switched on for a call and back behind it.

Compiled functions stay the objects they are: nothing is wrapped, also those are timed that were made before.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from optpass.backend.audit.events import CallEvent
from optpass.backend.compat.hooks import Args, Kwargs

if TYPE_CHECKING:
    from optpass.backend.audit.watch import Watch

#: `before`, the guard around it and the patch stand between a compiled function's entry and us.
_DEPTH = 3
_ENTRY = "compile_wrapper"
_DEEPEST = 100


class _Local(threading.local):
    """Calls that this thread is in, the innermost last: (entry frame, code, start, frames compiled before)."""

    def __init__(self) -> None:
        self.calls: list[tuple[types.FrameType, types.CodeType | None, float, int]] = []


class CallWatcher:
    """ENTER_COMPILED: called as a compiled function switches Dynamo on, and again as it switches it back."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._local = _Local()
        self._codes: dict[int, tuple[Any, types.CodeType | None]] = {}

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        now = time.perf_counter()
        frame = sys._getframe(_DEPTH)
        if frame.f_code.co_name != _ENTRY:
            return
        calls = self._local.calls
        for index in range(len(calls) - 1, -1, -1):
            if calls[index][0] is frame:
                _, code, start, compiles = calls[index]
                del calls[index:]
                if code is not None:
                    self._watch.tell_call(CallEvent(code, now - start, self._watch.local.started - compiles))
                return
        callback = args[0] if args else None
        if callable(callback) and len(calls) < _DEEPEST:
            calls.append((frame, self._code(callback, frame), time.perf_counter(), self._watch.local.started))

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        return None

    def _code(self, callback: Any, frame: types.FrameType) -> types.CodeType | None:
        """The code of the function called. Its frame's variables are read once per `torch.compile`: that is slow."""
        known = self._codes.get(id(callback))
        if known is None:
            known = self._codes[id(callback)] = (callback, _code_of(frame.f_locals.get("fn")))
        return known[1]


def _code_of(function: Any) -> types.CodeType | None:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(function, "__name__", "") != "forward":
        function = owner.forward
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None
