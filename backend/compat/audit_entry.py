"""Where `torch.compile` hands out compiled functions, and what switches them off: hook points and readers."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame as _eval_frame

from optpass.backend.compat.hooks import HookPoint

COMPILED = HookPoint(
    "torch._dynamo.eval_frame",
    "OptimizeContext.__call__",
    ("self", "fn"),
    "functions that are compiled but never called are not told",
)
NOT_COMPILED = HookPoint(
    "torch._dynamo.eval_frame",
    "_NullDecorator.__call__",
    ("self", "fn"),
    "functions that torch.compile gives back as they are are not told",
)
SET_STANCE = HookPoint(
    "torch._dynamo.decorators",
    "_set_stance",
    ("stance",),
    "calls under torch.compiler.set_stance are not counted",
)
ENTER = HookPoint(
    "torch._dynamo.eval_frame",
    "_callback_from_stance",
    ("callback",),
    "calls under torch.compiler.set_stance are not counted",
)
INLINED = HookPoint(
    "torch._dynamo.symbolic_convert",
    "InliningInstructionTranslator.inline_call_",
    ("self",),
    "functions that are compiled but never called are not told",
    before_only=True,  # it runs some tens of times in a compile
)
ENTRY_POINTS = (COMPILED, NOT_COMPILED, SET_STANCE, ENTER, INLINED)


def stance() -> str:
    """The stance in force, e.g. 'default' or 'force_eager'."""
    from torch._dynamo import eval_frame

    return str(getattr(getattr(eval_frame, "_stance", None), "stance", "default"))


def stance_name(given: Any) -> str:
    """The stance that `SET_STANCE` was called with."""
    return str(getattr(given, "stance", given))


def raises_where_not_compiled(given: Any) -> bool:
    """Whether a stance that `SET_STANCE` was called with raises when Dynamo is asked about a frame."""
    return stance_name(given) == "fail_on_recompile" or bool(getattr(given, "skip_guard_eval_unsafe", False))


def disabled_by_environment() -> bool:
    """Whether TORCHDYNAMO_DISABLE makes `torch.compile` give back what it gets."""
    return os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


def called_function(frame: types.FrameType) -> Any:
    """What the user compiled, from the frame of `torch.compile`'s wrapper for it; None for another frame."""
    if frame.f_code.co_name != "compile_wrapper" or not frame.f_code.co_filename.endswith("eval_frame.py"):
        return None
    return frame.f_locals.get("fn")


class Lookups:
    """Watches whether calls find compiled code; one slot in torch, which is shared with whoever was there before."""

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._before: Any = None
        self._installed = False

    def start(self) -> None:
        """Call `found` at every call that finds compiled code."""
        if not self._installed and hasattr(_eval_frame, "set_guard_complete_hook"):
            self._before = _eval_frame.set_guard_complete_hook(self._hook)
            self._installed = True

    def stop(self) -> None:
        """Watch no longer; a hook that was put in our place since stays."""
        if not self._installed:
            return
        current = _eval_frame.set_guard_complete_hook(self._before)
        if current != self._hook:
            _eval_frame.set_guard_complete_hook(current)
        self._installed = False

    def _hook(self, cache_hit: bool) -> bool:
        if cache_hit and self._installed:
            self._found()
        return bool(self._before(cache_hit)) if self._before is not None else cache_hit
