"""Whose line it is, and where in it: paths sorted into user, library and torch, and columns as editors count them."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from optpass.backend.audit.events import Place
from optpass.reporting.audit.model import Owner

_TORCH = (f"{Path(torch.__file__).parent}{os.sep}",)
#: Python code that Dynamo traces in place of a builtin, and its own wrappers: never what a reader looks for.
_DYNAMO = f"{_TORCH[0]}_dynamo{os.sep}"
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Files that exist only in memory. IPython's cells are the user's.
_GENERATED = ("<frozen ", "<string>", "<eval_with_key>", "<attrs ", "<__array_function__")


@functools.cache
def _standard() -> tuple[str, ...]:
    paths = (sysconfig.get_paths().get(name) for name in ("stdlib", "platstdlib"))
    return tuple({f"{os.path.realpath(path)}{os.sep}" for path in paths if path})


class Places:
    """Paths sorted by owner.

    Args:
        user_roots: folders that are the user's; None takes for the user's what is neither torch's, nor Python's own,
            nor in a folder of installed packages.
    """

    def __init__(self, user_roots: Sequence[Path] | None = None) -> None:
        self._roots = tuple(f"{os.path.realpath(root)}{os.sep}" for root in user_roots or ())
        self._known: dict[str, Owner] = {}

    def owner(self, file: str) -> Owner:
        """Whose file it is."""
        found = self._known.get(file)
        if found is None:
            found = self._known[file] = self._owner(file)
        return found

    def _owner(self, file: str) -> Owner:
        real = file if file.startswith("<") else os.path.realpath(file)
        if file.startswith(_TORCH) or real.startswith(_TORCH) or file.startswith("<eval_with_key>"):
            return "torch"
        if file.startswith(_GENERATED) or any(part in name for part in _PACKAGES for name in (file, real)):
            return "library"
        if self._roots:
            return "user" if real.startswith(self._roots) or file.startswith("<") else "library"
        return "library" if real.startswith(_standard()) else "user"

    def innermost(self, stack: Sequence[Place]) -> Place | None:
        """The last place that is not Dynamo's own."""
        for place in reversed(stack):
            if not place.file.startswith(_DYNAMO):
                return place
        return stack[-1] if stack else None

    def last_of_user(self, stack: Sequence[Place], above: Sequence[Place]) -> Place | None:
        """The user's innermost place: in what was traced, else in what called it (innermost first)."""
        for place in (*reversed(stack), *above):
            if self.owner(place.file) == "user":
                return place
        return None


def column(file: str, line: int, offset: int | None) -> int | None:
    """Column from 1 of a byte offset in a line; the offset itself + 1 where the source cannot be read."""
    if offset is None or offset < 0:
        return None
    text = linecache.getline(file, line)
    if not text or text.isascii():
        return offset + 1
    return len(text.encode("utf-8")[:offset].decode("utf-8", errors="ignore")) + 1
