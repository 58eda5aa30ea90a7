"""Unified diffs taken apart: putting the replacements in gives what the diff's author had."""

from __future__ import annotations

import difflib
import random

from optpass.reporting.audit.patches import Replacement, replacements


def put_in(text: str, changes: list[Replacement]) -> str:
    lines = text.splitlines(keepends=True)
    for change in reversed(changes):
        at = change.line - 1
        lines[at : at + change.deleted] = change.inserted.splitlines(keepends=True)
    return "".join(lines)


def test_random_edits_come_back() -> None:
    source = random.Random(7)
    for _ in range(200):
        before = [f"line {source.randrange(8)}\n" for _ in range(source.randrange(1, 40))]
        after = list(before)
        for _ in range(source.randrange(5)):
            at = source.randrange(len(after) + 1)
            after[at : at + source.randrange(3)] = [f"new {source.randrange(9)}\n"] * source.randrange(3)
        diff = "".join(difflib.unified_diff(before, after, "a/x.py", "b/x.py", n=source.randrange(4)))
        assert put_in("".join(before), replacements(diff)) == "".join(after), diff


def test_what_is_no_diff_has_none() -> None:
    assert replacements("") == [] and replacements("remove the print") == []
