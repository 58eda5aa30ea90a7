"""Ends a run after so many steps, as if the program had called `sys.exit()` there. Imported once torch is there.

A step is a step of an optimizer where the program has made one, else a call of the compiled function that was called
first. A program that has an optimizer and calls compiled functions very often without stepping it counts by calls.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from optpass.backend.audit.calls import Tally
from optpass.backend.audit.events import FrameEvent
from optpass.backend.audit.watch import WATCH

#: Calls per step after which an optimizer that never steps is no longer waited for.
_PATIENCE = 64
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
#: Times that the program may swallow the end before it is ended the hard way.
_SWALLOWED = 3


class StepsReached(SystemExit):
    """Ends the program cleanly: `finally` blocks, context managers and exit handlers run; the exit code is 0."""

    def __init__(self, *args: object) -> None:
        super().__init__(0)


class StepCounter:
    """Counts steps from `start` on and ends the program behind the last.

    Args:
        steps: how many; at least 1.
        reached: called once, as the end begins.
        give_up: called where the program goes on all the same; does not return.
    """

    def __init__(self, steps: int, reached: Callable[[str], None], give_up: Callable[[], None]) -> None:
        self._steps = steps
        self._reached = reached
        self._give_up = give_up
        self._optimizer_steps = 0
        self._calls = 0
        self._first: types.CodeType | None = None
        self._by_optimizer = False
        self._optimizer_compiled = False
        self._raised = 0
        self._handle: Any = None

    def start(self) -> None:
        """Count from now on."""
        self._handle = register_optimizer_step_post_hook(self._stepped)
        WATCH.listen(self, time_calls=True)

    def stop(self) -> None:
        """Count no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            WATCH.leave(self)

    def _stepped(self, *_: Any) -> None:
        if torch.compiler.is_compiling():  # traced into the user's graph: nothing may be left of it there
            return
        self._optimizer_steps += 1
        if self._optimizer_steps >= self._steps:
            self._end(f"{self._optimizer_steps} optimizer steps")

    def on_frame(self, event: FrameEvent) -> None:
        """Compiles do not count; but the steps of an optimizer that is compiled itself cannot be seen."""
        if event.code is not None and event.code.co_filename.startswith(_OPTIMIZERS):
            self._optimizer_compiled = True

    def tally(self, code: types.CodeType) -> Tally:
        """A compiled function is called for the first time: steps are counted by the first of them."""
        if self._first is None:
            self._first = code
        return _Counted(self._called) if code is self._first else Tally()

    def _called(self) -> None:
        """The first function returned from a call."""
        self._calls += 1
        if self._calls < self._steps or self._optimizer_steps or self._first is None:
            return
        if self._calls == self._steps:
            self._by_optimizer = not self._optimizer_compiled and _has_optimizer()
        if not self._by_optimizer or self._calls >= self._steps * _PATIENCE:
            self._end(f"{self._calls} calls of {self._first.co_qualname}")

    def _end(self, told: str) -> None:
        """Raise StepsReached, here and in the main thread.

        Out of a compiled call that is safe: it is told as its last act, when Dynamo is switched off already.
        """
        if self._raised == 0:
            self._reached(told)
        self._raised += 1
        if self._raised > _SWALLOWED:
            self._give_up()
        main = threading.main_thread()
        if threading.current_thread() is not main:
            _raise_in(main.ident)
        raise StepsReached


class _Counted(Tally):
    """A tally that tells of every call: its `calls` is set as a call's last act, with Dynamo switched off."""

    every_call = True

    __slots__ = ("_called", "_number")

    def __init__(self, called: Callable[[], None]) -> None:
        self._called: Callable[[], None] | None = None
        super().__init__()
        self._called = called

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._number

    @calls.setter
    def calls(self, number: int) -> None:
        self._number = number
        if self._called is not None:
            self._called()


def _has_optimizer() -> bool:
    # Not isinstance: it asks an object that stands for another (a weak proxy, a lazy module) what it is.
    return any(issubclass(type(thing), Optimizer) for thing in gc.get_objects())


def _raise_in(thread: int | None) -> None:
    """Raise StepsReached in a thread, at its next instruction of Python."""
    if thread is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(StepsReached))
