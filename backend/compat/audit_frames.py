"""Dynamo's decision on a frame: compile it, run it eager this once, run it eager for ever. Nothing here judges it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Protocol

from torch._C._dynamo import eval_frame as _eval_frame

from optpass.backend.compat.hooks import Args, HookPoint, Kwargs

try:
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
except ImportError:  # `FRAME.problem` says so, and nothing here is called
    KNOWS_DECISIONS = False
else:
    KNOWS_DECISIONS = hasattr(_eval_frame, "_debug_get_cache_entry_list")
    _SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)
    _RUN_ONLY = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.RUN_ONLY)
    #: What is compiled runs as under `_RUN_ONLY`, also what it calls; for what is not, Dynamo is asked.
    _ASK_WHEN_NOT_COMPILED = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.RUN_ONLY)


def refuses(result: Any) -> str | None:
    """'skip' or 'run only' when the code is never to be compiled again; None for any other decision."""
    if result is None or result.guarded_code is not None or not result.apply_to_code:
        return None
    action = result.frame_exec_strategy.cur_action
    return {FrameAction.SKIP: "skip", FrameAction.RUN_ONLY: "run only"}.get(action)


def keep_asking(result: Any, refusal: str) -> Any:
    """Change a decision so that Dynamo is asked again at the next call, and nothing else; gives the answer for then."""
    answer = type(result)(frame_exec_strategy=_RUN_ONLY if refusal == "run only" else _SKIP, apply_to_code=False)
    if refusal == "run only":
        result.frame_exec_strategy = _ASK_WHEN_NOT_COMPILED
    else:
        result.apply_to_code = False
    return answer


def final(result: Any, refusal: str) -> Any:
    """The decision as Dynamo took it, for good."""
    return type(result)(frame_exec_strategy=_RUN_ONLY if refusal == "run only" else _SKIP, apply_to_code=True)


def apply(code: types.CodeType, refusal: str) -> None:
    """Put Dynamo's own decision on the code."""
    _eval_frame.set_code_exec_strategy(code, _RUN_ONLY if refusal == "run only" else _SKIP)


def ask_again(code: types.CodeType, refusal: str) -> None:
    """The opposite of `apply`: as `keep_asking` left the code."""
    default = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    _eval_frame.set_code_exec_strategy(code, _ASK_WHEN_NOT_COMPILED if refusal == "run only" else default)


def retire_entries(code: types.CodeType) -> bool:
    """Give up the code's compiled entries, which a skip makes unreachable; whether that was possible.

    As Dynamo itself does it when an object dies that an entry needs.
    """
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for entry in _eval_frame._debug_get_cache_entry_list(code):
        manager = entry.guard_manager
        if isinstance(manager, DeletedGuardManagerWrapper):
            continue
        state = getattr(manager, "extra_state", None)
        if state is None:
            return False
        state.invalidate(entry, DeletedGuardManagerWrapper("the code was skipped"))
    return True


def is_compiled(code: types.CodeType) -> bool:
    """Whether the code has compiled entries."""
    return bool(_eval_frame._debug_get_cache_entry_list(code))


def isolated() -> bool:
    """Whether the running call keeps its compiled entries apart (`isolate_recompiles=True`)."""
    read = getattr(_eval_frame, "get_eval_frame_isolate_recompiles_id", None)
    return callable(read) and read() >= 0


def dynamo_disabled() -> bool:
    """`torch._dynamo.config.disable`."""
    import torch._dynamo.config as config

    return bool(getattr(config, "disable", False))


def is_skipped_file(code: types.CodeType) -> bool:
    """Whether Dynamo leaves everything in the code's file alone."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(code))


def is_soft(error: BaseException) -> bool:
    """Whether Dynamo falls back to eager for it as a matter of course."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error, (Unsupported, UserError))


def active_dispatch_modes() -> list[str]:
    """Names of the torch dispatch modes that are active in this thread, the outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__qualname__ for mode in _get_current_dispatch_mode_stack()]


def frames_above(skip: int) -> Iterator[types.FrameType]:
    """Frames of this thread outwards from the one that is `skip` above the caller."""
    frame: types.FrameType | None = sys._getframe(skip + 1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class FramePoint(HookPoint):
    """Dynamo's callback for a frame that matches no compiled code: it may be answered in Dynamo's place.

    `answer(frame, frame_state)` gives what the callback returned for this code before, or None to let Dynamo decide;
    `decided(frame, frame_state, result, error)` sees, and may change, what Dynamo decided.
    """

    listener: FrameListener | None = None

    def problem(self) -> str | None:
        """As for every hook point; Dynamo's decisions must be known by name as well."""
        if not KNOWS_DECISIONS:
            return f"{self.name} answers in a form that is not known (torch._C._dynamo.eval_frame)"
        return super().problem()

    def listen(self, listener: FrameListener | None) -> str | None:
        """Install for `listener`; None: put the original back. Gives the problem if that is impossible."""
        with self._lock:
            self.listener = listener
            if listener is None:
                self.remove(_NOBODY)
                return None
            return self.add(_NOBODY)

    def after_fork(self) -> None:
        """As for every hook point; the listener is not there either."""
        super().after_fork()
        self.listener = None

    def _wrap(self, original: Any) -> Any:
        def optpass_hook(wrapper: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
            listener = self.listener if self._patch is optpass_hook else None
            if listener is None:
                return original(wrapper, frame, cache_entry, frame_state)
            answer = self._guarded(listener.answer, frame, frame_state)
            if answer is not None:
                return answer
            try:
                result = original(wrapper, frame, cache_entry, frame_state)
            except BaseException as error:
                self._guarded(listener.decided, frame, frame_state, None, error)
                raise
            self._guarded(listener.decided, frame, frame_state, result, None)
            return result

        optpass_hook.__code__ = self._as_torchs(optpass_hook.__code__)
        optpass_hook.__wrapped__ = original  # type: ignore[attr-defined]
        return optpass_hook


class FrameListener(Protocol):
    """Who answers for Dynamo, see `FramePoint`."""

    def answer(self, frame: Any, frame_state: Any) -> Any: ...

    def decided(self, frame: Any, frame_state: Any, result: Any, error: BaseException | None) -> None: ...


class _Nobody:
    """A watcher that the patch is installed for; the listener is asked instead."""

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        return None

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        return None


_NOBODY = _Nobody()
FRAME = FramePoint(
    "torch._dynamo.convert_frame",
    "CatchErrorsWrapper.__call__",
    ("self", "frame", "cache_entry", "frame_state"),
    "code that runs eager without a word is not recorded, nor are functions that are compiled but never called",
)
