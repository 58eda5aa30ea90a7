"""Why Dynamo leaves a frame to eager, in plain words, and what to do about it. Noise is told apart here."""

from __future__ import annotations

import os
import re
import types
from dataclasses import dataclass
from typing import Any

from optpass.backend.audit.explain import explain, is_limit
from optpass.backend.audit.locations import Function, code_of, code_place, is_standard, is_torch
from optpass.backend.audit.values import shorten
from optpass.backend.audit.ways import may_compute
from optpass.backend.compat import audit_frames as frames
from optpass.backend.compat import audit_guards as guards
from optpass.reporting.audit.model import SilentKind

_GENERATOR = 0x20 | 0x80 | 0x200  # inspect's CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_LIMIT_NAME = re.compile(r"(accumulated_)?(recompile|cache_size)_limit")
_LIMIT_VALUE = re.compile(r"currently set to (\d+)")


@dataclass(frozen=True)
class Verdict:
    """Why a function runs eager."""

    kind: SilentKind
    place: Function
    reason: str
    fix: str


@dataclass
class Attempt:
    """What happened between Dynamo's being asked and its answer.

    Attributes:
        compiled: whether it began to compile the frame.
        change: what changed since the last compile, where it refused for having compiled too often.
    """

    compiled: bool = False
    error: BaseException | None = None
    call: guards.CompileCall | None = None
    change: str = ""

    def look(self) -> None:
        """Note what is only known while the frame is at hand."""
        if self.error is None or self.call is None or not is_limit(self.error):
            return
        found = explain(self.call, {}, None).finding
        if found.source:
            self.change = f"{found.source} (was {found.before}, now {found.after}; cause: {found.cause})"

    def forget(self) -> None:
        """Let go of the frame's values."""
        self.call = self.error = None


def judge(frame: Any, result: Any, attempt: Attempt) -> Verdict | None:
    """Why the frame runs eager; None where that is nobody's loss: torch's own frames, frames without tensors."""
    code: types.CodeType = frame.f_code
    place = _place(attempt, code)
    if attempt.compiled:
        if is_torch(code) and attempt.call is not None and guards.wrapped_callable(attempt.call) is None:
            return None
        if attempt.error is not None:
            return _of_error(place, attempt)
        # Of Python's own library nobody asked to compile anything: it was called from code that runs eager.
        return None if is_standard(code) else _without_ops(place, code, asked=is_entry())
    if is_torch(code) or is_standard(code) or frames.is_skipped_file(code):
        return None
    if frames.dynamo_disabled():
        return _disabled(place) if is_entry() else None
    modes = frames.active_dispatch_modes()
    if modes and is_entry():
        return _dispatch_mode(place, modes)
    if code.co_flags & _GENERATOR:
        return _generator(place, code)
    reason = getattr(result, "skip_reason", None)
    if is_entry() and reason and "Dynamo-generated" not in reason:
        return Verdict("frame skipped", place, f"Dynamo does not compile such a frame: {reason}.", _CALL_A_FUNCTION)
    return None


_CALL_A_FUNCTION = "Compile a plain function or module that this code calls."


def _place(attempt: Attempt, code: types.CodeType) -> Function:
    wrapped = guards.wrapped_callable(attempt.call) if attempt.call is not None else None
    inner = code_of(wrapped) if wrapped is not None else None
    return code_place(inner if inner is not None else code)


def is_entry(resumed: types.CodeType | None = None) -> bool:
    """Whether the frame that Dynamo was asked about is what the user compiled: nothing of theirs is in between.

    Args:
        resumed: the user's function, where the frame goes on behind a break of it: its own frames do not count.
    """
    own = None if resumed is None else _place_of(resumed)
    for frame in frames.frames_above(1):
        code = frame.f_code
        if own is not None and own == _place_of(guards.user_code(code)):
            continue
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        module = str(frame.f_globals.get("__name__", ""))
        if not (is_torch(code) or module.startswith(("optpass.", "torch.")) or "optpass" in code.co_filename[:8]):
            return False
    return False


def _place_of(code: types.CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _of_error(place: Function, attempt: Attempt) -> Verdict | None:
    error = attempt.error
    assert error is not None
    if is_limit(error):
        return _limit(place, error, attempt.change)
    if frames.is_soft(error):
        kind = getattr(error, "gb_type", None)
        what = kind if isinstance(kind, str) else type(error).__name__
        return Verdict(
            "frame skipped",
            place,
            f"Dynamo met what it cannot trace ({what}) where it cannot resume, and gave up on the whole function: "
            f"{_first_line(error)}",
            "Move what it met out of this function, or into one of its own behind torch.compiler.disable; the graph "
            "break of that place says where it is.",
        )
    return Verdict(
        "backend error suppressed",
        place,
        f"Compiling failed with {_failure(error)}, and torch._dynamo.config.suppress_errors hides it.",
        "Set torch._dynamo.config.suppress_errors = False and solve the error, or leave the function that fails out "
        "with torch.compiler.disable.",
    )


def _failure(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__} ({_first_line(inner)})"


def _first_line(error: BaseException) -> str:
    text = getattr(error, "msg", None)
    lines = [line for line in str(text if isinstance(text, str) else error).splitlines() if line.strip()]
    return shorten(lines[0], 200) if lines else type(error).__name__


def _limit(place: Function, error: BaseException, change: str) -> Verdict:
    text = f"{getattr(error, 'context', '')} {error}"
    name = match[0] if (match := _LIMIT_NAME.search(text)) is not None else "recompile_limit"
    value = (
        match[1] if (match := _LIMIT_VALUE.search(text)) is not None else str(guards.recompile_limits().get(name, ""))
    )
    last = f" The last change was {change}." if change else ""
    more = f" If so many variants are wanted, set torch._dynamo.config.{name} = {2 * int(value)}." if value else ""
    cure = (
        f"Stop {change.partition(' (')[0]} from changing" if change else "Stop what its recompiles name from changing"
    )
    return Verdict(
        "recompile limit",
        place,
        f"Compiled {value or 'too many'} times, the most that torch._dynamo.config.{name} allows; calls that match "
        f"none of them run eager.{last}",
        f"{cure}: its recompiles say how.{more}",
    )


def _without_ops(place: Function, code: types.CodeType, *, asked: bool) -> Verdict | None:
    if not may_compute(code, asked=asked):
        return None  # there is nothing to compile, whatever it is called with
    behind = guards.resumes_behind(code)
    if behind is not None:
        return Verdict(
            "skip poisoned",
            place,
            f"One call took a way behind the graph break in line {behind} that runs no tensor operation; Dynamo took "
            "all that goes on there for code that never does, and runs it eager for ever.",
            f"Solve the graph break in line {behind}; or take the early return outside of the compiled function, or "
            "set torch._dynamo.config.allow_empty_graphs = True.",
        )
    return Verdict(
        "skip poisoned",
        place,
        "One call took a way through it that runs no tensor operation; Dynamo took the function for one that never "
        "does and skips it for ever.",
        "Take the early return outside of the compiled function, call it first with inputs that run its operations, "
        "or set torch._dynamo.config.allow_empty_graphs = True.",
    )


def _disabled(place: Function) -> Verdict:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        why, fix = "The environment sets TORCH_COMPILE_DISABLE=1", "Unset TORCH_COMPILE_DISABLE."
    else:
        why = "torch._dynamo.config.disable is True"
        fix = "Do not set torch._dynamo.config.disable; torch.compiler.set_stance('force_eager') can be undone."
    return Verdict("compile disabled", place, f"{why}: torch.compile does nothing.", fix)


def _dispatch_mode(place: Function, modes: list[str]) -> Verdict:
    shown = ", ".join(modes)
    return Verdict(
        "frame skipped",
        place,
        f"It was called under a torch dispatch mode ({shown}), which Dynamo cannot compile; it then skips the function "
        "for ever, also outside of the mode.",
        f"Call the function compiled before it runs under {shown}, or use the mode on the eager function.",
    )


def _generator(place: Function, code: types.CodeType) -> Verdict:
    what = "coroutine" if code.co_flags & 0x80 else "generator"
    return Verdict(
        "frame skipped",
        place,
        f"It is a {what}, which Dynamo does not compile.",
        f"Compile the functions that the {what} calls between its yields, or return a list.",
    )
