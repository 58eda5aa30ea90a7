"""From a graph break to a diff against the user's file, where the change is mechanical.

Each rewrite proves on the syntax tree that it may be made, and declines otherwise; the first that does not decline is
proposed. What a rewrite cannot prove (shapes, dtypes, what a caller does) is for `optpass.auditing.verify`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from optpass.auditing.fixes import patch
from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites import (
    branches,
    checks,
    cond,
    copies,
    hoisting,
    masks,
    numbers,
    removal,
    scalars,
    telling,
)
from optpass.auditing.fixes.site import Site, locate
from optpass.auditing.fixes.source import Edit, Source, apply_edits
from optpass.reporting.audit.model import Break


class Rewrite(Protocol):
    """One kind of mechanical change.

    Attributes:
        name: short name, for messages and tests.
        note: what the user should know of the change; '' where there is nothing.
    """

    name: str
    note: str

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """The change, or None where it is not proved to be right."""


#: In order of preference: what keeps every effect first, what takes more from the program later.
REWRITES: tuple[Rewrite, ...] = (
    removal.RemoveStatement(),
    telling.GuardTelling(),
    telling.GuardTellingBranch(),
    checks.AssertTensor(),
    telling.GuardMessage(),
    checks.AssertInGraph(),
    branches.WhereBranch(),
    branches.WhereExpression(),
    cond.CondBranch(),
    copies.CloneCopy(),
    copies.StackTensors(),
    copies.TorchForNumpy(),
    scalars.KeepTensor(),
    numbers.BranchOnNumber(),
    masks.MaskedReduction(),
    masks.MaskedUpdate(),
    scalars.CaptureScalar(),
    scalars.CaptureDynamicShape(),
    hoisting.HoistCall(),
    hoisting.HoistFile(),
)


@dataclass(frozen=True)
class Proposal:
    """A change of one file that should remove a break.

    Attributes:
        rewrite: name of the rewrite.
        note: what the user should know of it.
        edits: spans of the file's text and what replaces them; to be made together or not at all.
    """

    rewrite: str
    note: str
    edits: tuple[Edit, ...]


def place_of(brk: Break) -> tuple[str, int]:
    """(file, line) of the user's code that the break is in, or that led to it."""
    if brk.owner != "user" and brk.user_file is not None and brk.user_line is not None:
        return brk.user_file, brk.user_line
    return brk.file, brk.line


def proposals(brk: Break, text: str) -> list[Proposal]:
    """Every rewrite that applies, the preferred one first; empty where none does or the text is not Python."""
    try:
        source = Source(text)
    except (SyntaxError, ValueError):
        return []
    site = locate(brk, source)
    if site is None:
        return []
    found = []
    for rewrite in REWRITES:
        edits = rewrite.edits(site, Facts(site))
        if edits and _valid(text, edits):
            found.append(Proposal(rewrite.name, rewrite.note, tuple(dict.fromkeys(edits))))
    return found


def propose(brk: Break, source_text: str, root: str = "") -> str:
    """A unified diff against the user's file, where the fix is mechanical; '' otherwise. As `propose_with_note`."""
    return propose_with_note(brk, source_text, root)[0]


def propose_with_note(brk: Break, source_text: str, root: str = "") -> tuple[str, str]:
    """A diff, and what to know of it before taking it; both '' where the fix is not mechanical.

    Args:
        brk: the break.
        source_text: text of the user's file (`place_of(brk)`), with its own line endings.
        root: folder that the diff's header names the file from; '' is the working directory.
    """
    found = proposals(brk, source_text)
    if not found:
        return "", ""
    after = apply_edits(source_text, found[0].edits)
    return patch.unified(place_of(brk)[0], source_text, after, root), found[0].note


def propose_all(breaks: Sequence[Break], files: Mapping[str, str], root: str = "") -> dict[str, str]:
    """One diff per file with the fixes of all its breaks.

    Breaks that only follow from another are left out, and so is a fix that touches what an earlier one changes (the
    breaks come the costliest first).

    Args:
        breaks: the audit's breaks.
        files: text of each of the user's files.
        root: folder that the diffs' headers name the files from; '' is the working directory.
    """
    diffs = {}
    for file, text in files.items():
        after = text
        chosen = [b for b in breaks if b.caused_by is None and place_of(b)[0] == file]
        edits = compose([found[0] for b in chosen if (found := proposals(b, text))])
        if edits and _valid(text, edits):
            after = apply_edits(text, edits)
        if after != text:
            diffs[file] = patch.unified(file, text, after, root)
    return diffs


def compose(found: Sequence[Proposal]) -> list[Edit]:
    """The edits of all proposals that do not get in each other's way; equal edits are made once.

    One that rewrites the whole of what another one rewrites a part of, as for a branch in a branch, stands for both.
    """
    kept: list[Edit] = []
    for proposal in found:
        if any(_covers(other, edit) for edit in proposal.edits for whole in found for other in whole.edits):
            continue
        new = [edit for edit in proposal.edits if edit not in kept]
        if not any(_conflict(edit, other) for edit in new for other in kept):
            kept += new
    return kept


def _covers(whole: Edit, part: Edit) -> bool:
    inside = whole.start <= part.start and part.end <= whole.end and part.start < part.end
    return inside and whole.end - whole.start > part.end - part.start


def _conflict(one: Edit, other: Edit) -> bool:
    if one.start == one.end and other.start == other.end:
        return False  # two insertions, made one behind the other
    if one.start == one.end or other.start == other.end:
        point, span = (one, other) if one.start == one.end else (other, one)
        return span.start < point.start < span.end
    return one.start < other.end and other.start < one.end


def _valid(text: str, edits: Sequence[Edit]) -> bool:
    """Whether the edits fit each other and leave Python behind."""
    try:
        ast.parse(apply_edits(text, list(dict.fromkeys(edits))).removeprefix("\ufeff"))
    except (SyntaxError, ValueError):
        return False
    return True
