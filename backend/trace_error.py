"""Why tracing failed, in one line with the user's own line: reading exceptions of Dynamo and of fake tensors."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import torch

from optpass.errors import told

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
#: Code that is not the user's: frames in it never say where the fault is.
_NOT_THEIRS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).resolve().parent,
        Path(__file__).resolve().parents[1] / "passes",
    )
)
_MOST = 300
#: How Dynamo quotes the error that an op raised under fake tensors.
_QUOTED = re.compile(r": got (\w+)\((['\"])(.*)\2\)\.?\s*$")


def reason(error: BaseException, *, place: bool = True) -> str:
    """`ValueError: what it said (at file:line)`: first line of the innermost cause, and the user's innermost line."""
    chain = [error]
    while (cause := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
        chain.append(cause)  # what a backend raises is no cause of Dynamo's error, but hangs on it
    found = next((p for p in map(_place, reversed(chain)) if p), "") if place else ""
    return _said(chain[-1]) + (f" (at {found})" if found else "")


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in told(error).splitlines() if line.strip()]
    for line in lines:
        quoted = _QUOTED.search(line)
        if quoted is not None:
            return f"{quoted[1]}: {quoted[3]}"[:_MOST]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:_MOST]


def _place(error: BaseException) -> str:
    """The innermost frame of the user's that the message quotes (Dynamo's 'from user code') or the traceback has."""
    quoted = [(m["file"], int(m["line"])) for m in _FRAME.finditer(told(error))]
    walked = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    for file, line in (*reversed(quoted), *reversed(walked)):
        if _theirs(file):
            return f"{file}:{line}"
    return ""


def _theirs(file: str) -> bool:
    real = os.path.realpath(file)
    return not file.startswith("<") and not any(f.startswith(_NOT_THEIRS) for f in (file, real))
