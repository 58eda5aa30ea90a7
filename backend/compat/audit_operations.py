"""Torch's profiler of old, which tells what a thread runs; the present one writes to standard error when it starts.

A profiler of the program's own goes first: none is started beside one, and one that the program starts ends ours.
It is started and stopped once each, around one call: the autograd engine puts back what a thread had when a backward
began, so that one that is stopped, or started, during a backward would be left half in force.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_record_function

#: Kind ('push', 'pop' or other), name and identity of an event; see `OperationLog.stop`.
Event = tuple[str, str, tuple[int, int]]

#: What a profiler calls first as it starts, where it looks it up.
_BEGINNINGS = (
    ("torch.autograd.profiler", "_prepare_profiler"),
    ("torch.autograd.profiler", "_run_on_profiler_start"),
    ("torch.autograd.profiler_legacy", "_enable_profiler_legacy"),
)


class OperationLog:
    """What the thread that starts it runs, from `start` to `stop`.

    Attributes:
        running: between the two, unless the program began to profile.
    """

    def __init__(self) -> None:
        self.running = False
        self._resting = 0
        self._backwards = 0
        self._thread = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> bool:
        """Log from now on; False where somebody profiles already, or torch has no such profiler."""
        if torch.autograd.profiler._is_profiler_enabled:
            return False
        try:
            from torch.autograd import profiler_legacy

            profiler_legacy.profile(enabled=True).__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        except (ImportError, RuntimeError):  # none, or another one of this thread's, which tells nobody
            return False
        self.running = True
        self._thread = threading.get_ident()
        self._watch_beginnings()
        self._watch_backwards(True)
        return True

    def stop(self) -> list[list[Event]] | None:
        """Log no longer; the events of each thread, in order. What began and has not ended has no 'pop'.

        None where the program began to profile, or it is not known when a backward had been compiled.
        """
        if not self.running:
            return None
        self.running = False
        self._watch_backwards(False)
        for owner, name, original, ours in self._replaced:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._replaced = []
        if self._resting:
            self._resting = 0
            _enable_record_function(True)
        records: Any = _disable_profiler_legacy()
        if self._backwards:
            self._backwards = 0
            return None
        return [[(r.kind(), r.name(), (r.handle(), r.node_id())) for r in thread] for thread in records]

    def rest(self) -> None:
        """Log nothing until `go_on`, as often as this is called."""
        if self.running:
            self._resting += 1
            _enable_record_function(False)

    def go_on(self) -> None:
        """Log again."""
        if self._resting:
            self._resting -= 1
            if not self._resting:
                _enable_record_function(True)

    def _watch_beginnings(self) -> None:
        for module, name in _BEGINNINGS:
            owner = getattr(torch.autograd, module.rpartition(".")[2], None)
            original = getattr(owner, name, None)
            if original is not None:
                ours = self._first(original)
                setattr(owner, name, ours)
                self._replaced.append((owner, name, original, ours))

    def _watch_backwards(self, on: bool) -> None:
        """Rest while a backward is compiled, which happens where it is first run.

        `torch._dynamo.reset()` forgets who watches: then there is nobody to remove.
        """
        handler = getattr(torch._dynamo.callback, "callback_handler", None)
        for kind, callback in (("start", self._backward_begins), ("end", self._backward_ends)):
            change = getattr(handler, f"{'register' if on else 'remove'}_{kind}_callback", None)
            if change is not None:
                with contextlib.suppress(ValueError):
                    change(callback)

    def _backward_begins(self, args: Any) -> None:
        if self._of_backward(args):
            self._backwards += 1
            self.rest()

    def _backward_ends(self, args: Any) -> None:
        """Of compiles that overlap in several threads, only the first to begin and the last to end are told."""
        if self._backwards and self._of_backward(args):
            self._backwards -= 1
            self.go_on()

    def _of_backward(self, args: Any) -> bool:
        trigger = getattr(getattr(args, "callback_trigger", None), "name", "")
        return trigger == "LAZY_BACKWARD" and threading.get_ident() == self._thread

    def _first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = threading.get_ident()

        def optpass_gives_way(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                self.stop()
            return original(*args, **kwargs)

        return optpass_gives_way


def fast_marker(name: str) -> Any:
    """A context that the log shows under `name`, entered without running Python code."""
    make: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None) or torch.autograd.profiler.record_function
    return make(name)
