"""Unified diffs taken apart: which lines of which file a fix replaces by what. Applies nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True)
class Replacement:
    """Lines [line, line + deleted) of the old file become `inserted`; `deleted` 0 inserts before `line`."""

    line: int
    deleted: int
    inserted: str


def replacements(diff: str) -> list[Replacement]:
    """The changes of a unified diff of one file, in order; empty where it is not one."""
    result: list[Replacement] = []
    lines = diff.splitlines()
    at = 0
    while at < len(lines):
        match = _HUNK.match(lines[at])
        at += 1
        if match is not None:
            # "-5,0" means behind line 5.
            start = int(match[1]) + (1 if match[2] == "0" else 0)
            end = at
            while end < len(lines) and lines[end][:1] in (" ", "+", "-", "\\", ""):
                end += 1
            result += _hunk(lines[at:end], start)
            at = end
    return result


def _hunk(lines: list[str], line: int) -> Iterator[Replacement]:
    deleted, inserted = 0, ""
    for text in [*lines, " "]:
        if text.startswith("-"):
            deleted += 1
        elif text.startswith("+"):
            inserted += text[1:] + "\n"
        elif not text.startswith("\\"):
            if deleted or inserted:
                yield Replacement(line, deleted, inserted)
                line, deleted, inserted = line + deleted, 0, ""
            line += 1
