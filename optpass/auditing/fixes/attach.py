"""Diffs for the breaks of an audit."""

from __future__ import annotations

from pathlib import Path

from optpass.auditing.fixes.reading import read
from optpass.auditing.fixes.rewrite import place_of, propose_with_note
from optpass.errors import AuditError
from optpass.reporting.audit.model import Audit


def attach_diffs(audit: Audit) -> Audit:
    """Fill `fix.diff` and its note of each break in the user's own code whose fix is mechanical; others stay.

    Breaks that only follow from another get none: they go with it.
    """
    texts: dict[str, str] = {}
    for brk in audit.breaks:
        if brk.fix.diff or brk.caused_by is not None or (brk.owner != "user" and brk.user_file is None):
            continue
        file, _ = place_of(brk)
        if file not in texts:
            try:
                texts[file] = read(Path(file)).text
            except AuditError:  # a notebook cell, an exec'd string, a file that is gone
                texts[file] = ""
        if texts[file]:
            brk.fix.diff, brk.fix.note = propose_with_note(brk, texts[file], audit.root)
    return audit
