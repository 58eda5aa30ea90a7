"""How a message names what the user gave: by its flag on the command line, by its argument in Python.

Standard library only. What the names mean is the business of those who take them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_COMMAND_LINE: ContextVar[bool] = ContextVar("optpass_command_line", default=False)
#: Arguments whose flag is not their own name.
_FLAGS = {"memory_budget": "--budget", "micro_batch": "--batch", "sets": "--set"}
#: Characters of a value that a message shows.
_MOST = 120


@contextlib.contextmanager
def on_the_command_line() -> Iterator[None]:
    """Inside, messages name flags."""
    token = _COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _COMMAND_LINE.reset(token)


def flag(name: str) -> str:
    """`--dtype`: the flag of an argument."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def argument(name: str) -> str:
    """`--dtype`, or in Python `dtype`."""
    return flag(name) if _COMMAND_LINE.get() else name


def given(name: str, value: object) -> str:
    """`--dtype 'fp7'`, or in Python `dtype='fp7'`."""
    return f"{argument(name)}{' ' if _COMMAND_LINE.get() else '='}{shown(value)}"


def setting(key: str, value: object = None) -> str:
    """`--set batch=0`, or in Python `sets: batch=0`; without a value the key alone."""
    where = "--set" if _COMMAND_LINE.get() else "sets:"
    return f"{where} {key}" if value is None else f"{where} {key}={value}"


def shown(value: object) -> str:
    """A value as Python writes it, in one line that is not long: an object's own text may be a page."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 4]} ..."
