"""Room on CPython's own stack for what runs deep. Nothing of torch is known here.

CPython keeps Python frames in chunks of 16 KiB (`_PyThreadState_PushFrame`, 3.11 and later), and gives a chunk back to
the operating system as soon as the first frame in it returns. Where a chunk's end falls into a place that calls small
functions all the time, each of these calls maps and unmaps memory: thousands of times in one compile, a tenth to a
fourth of its processor time (measured on 3.11: 4,347 times in a compile of a small BERT). Whether that happens depends
on how deep the caller stands, so that any frame more can make a compile much slower, or much faster.

A frame that asks for much stack gets a chunk to fit, whose size is a power of two: what it leaves is there for all
frames below it. Only what is touched costs memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Words that a frame with room asks for, a little over a power of two: frames below it get nearly as many. A frame of
#: Dynamo's or Inductor's takes some 40; the recursion limit is 1,000 frames.
_WORDS = 1 << 15


def with_room(code: types.CodeType) -> types.CodeType:
    """The same code, whose frames leave room for some hundred frames below them."""
    return code.replace(co_stacksize=code.co_stacksize + _WORDS)


def run_with_room(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)`, with room for some hundred frames."""
    return function(*args, **kwargs)


def _make_room(function: Any) -> None:
    function.__code__ = with_room(function.__code__)


_make_room(run_with_room)
