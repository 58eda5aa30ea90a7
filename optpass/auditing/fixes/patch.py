"""Unified diffs: made from two texts, applied to one, and written to a file. Knows nothing of Python or of breaks."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from stat import S_IMODE

from optpass.errors import AuditError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"


def unified(path: str, before: str, after: str, root: str = "") -> str:
    """A diff with `a/` and `b/` headers; '' if nothing changed.

    The header names the file from `root` (the working directory where that is '') if it lies under it, so that
    `git apply` and `patch -p1` find it from there; otherwise by its whole path.
    """
    name = _shown(path, root)
    lines = difflib.unified_diff(split(before), split(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)


def applied(diff: str, before: str) -> str:
    """The text after the diff.

    Raises:
        AuditError: the diff does not fit the text, or is not a unified diff.
    """
    old, new, position = split(before), [], 0
    for start, removed, added in _hunks(diff):
        if old[start : start + len(removed)] != removed or start < position:
            raise AuditError(f"the diff does not fit the file at line {start + 1}; was it changed since the audit?")
        new += [*old[position:start], *added]
        position = start + len(removed)
    return "".join([*new, *old[position:]])


def line_map(before: str, after: str) -> Callable[[int], range]:
    """Where a line of `before` is in `after`: a range of line numbers from 1, empty if it is gone without trace.

    Lines that were replaced map to all lines that stand in their place.
    """
    places: dict[int, range] = {}
    matcher = difflib.SequenceMatcher(None, split(before), split(after), autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        for line in range(a, b):
            places[line + 1] = range(c + line - a + 1, c + line - a + 2) if tag == "equal" else range(c + 1, d + 1)
    return lambda line: places.get(line, range(0))


def split(text: str) -> list[str]:
    """Lines with their endings, split at '\\n' only, as diffs do."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def write(path: Path, text: str, encoding: str) -> None:
    """Replace a file in one step: it holds the old text or the new one at any time. Mode bits stay.

    A symbolic link stays a link; the file it leads to is replaced.

    Raises:
        AuditError: it cannot be written.
    """
    target = path.resolve()
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding=encoding, newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).chmod(S_IMODE(target.stat().st_mode))
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise AuditError(f"cannot write {path}: {error.strerror or error}") from error


def _hunks(diff: str) -> list[tuple[int, list[str], list[str]]]:
    """(index of the first old line, old lines, new lines) of each hunk."""
    hunks: list[tuple[int, list[str], list[str]]] = []
    last: list[list[str]] = []
    for line in split(diff):
        head = _HUNK.match(line)
        if head:
            start, count = int(head[1]), int(head[2] or 1)
            hunks.append((start - 1 if count else start, [], []))
        elif not hunks:
            continue
        elif line == _NO_NEWLINE:
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
        elif line[0] in " -+":
            _, old, new = hunks[-1]
            last = [side for side, marks in ((old, " -"), (new, " +")) if line[0] in marks]
            for side in last:
                side.append(line[1:])
        else:
            raise AuditError(f"not a unified diff: {line.rstrip()!r}")
    return hunks


def _shown(path: str, root: str) -> str:
    absolute, base = Path(path).absolute(), Path(root).absolute() if root else Path.cwd()
    return (absolute.relative_to(base) if absolute.is_relative_to(base) else absolute).as_posix().lstrip("/")


def same_change(one: str, other: str) -> bool:
    """Whether two diffs make the same change, whatever their headers call the file."""
    return [line for line in split(one) if not line.startswith(("--- ", "+++ "))] == [
        line for line in split(other) if not line.startswith(("--- ", "+++ "))
    ]
