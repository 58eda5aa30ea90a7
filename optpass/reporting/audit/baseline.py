"""The difference between two audits: what is new, gone and the same, found again when lines have moved.

A finding is known by its file below the project's root, its function, what it is, and the text of its source line;
neither by line number nor by how often it occurred. Rendering is not here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from optpass.reporting.audit import words
from optpass.reporting.audit.model import Audit, Break, Recompile, SilentEager
from optpass.reporting.audit.source import relative
from optpass.reporting.text import percent

FindingKind = Literal["break", "recompile", "silent eager", "ops captured"]
Status = Literal["new", "gone", "same"]

#: A fall of the share of operations in graphs that is told; less comes from which calls a run happens to make.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Finding:
    """One entry of an audit that a gate counts.

    Attributes:
        record: None for the share of operations captured.
        root: project folder of the audit that it stands in.
    """

    kind: FindingKind
    record: Break | Recompile | SilentEager | None
    root: str
    told: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What makes it the same finding in another audit."""
        record = self.record
        if record is None:
            return (self.kind,)
        place = (self.kind, relative(record.file, self.root), record.function)
        if isinstance(record, Break):
            return (*place, record.gb_type, record.code)
        if isinstance(record, Recompile):
            return (*place, record.cause, record.source)
        return (*place, record.kind)

    def line(self) -> str:
        """The finding in one line: `train.py:12:9 in f: GB0170 Data-dependent branching`."""
        record = self.record
        if isinstance(record, Break):
            return f"{words.where(record, self.root)}: {words.kind(record)}"
        if isinstance(record, Recompile):
            return f"{words.where_function(record, self.root)}: recompiled, {words.changed(record)}"
        if isinstance(record, SilentEager):
            return f"{words.where_function(record, self.root)}: runs eager, {words.silent(record)}"
        return self.told


@dataclass(frozen=True)
class Difference:
    """What changed from a baseline to an audit.

    Attributes:
        counts: (what, before, after) of the summaries.
    """

    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    same: tuple[Finding, ...]
    counts: tuple[tuple[str, str, str], ...]

    def headline(self) -> str:
        """`against the baseline: 1 new, 2 gone, 5 the same`."""
        return f"against the baseline: {len(self.new)} new, {len(self.gone)} gone, {len(self.same)} the same"

    def status(self, record: Break | Recompile | SilentEager) -> Status | None:
        """How a record of either audit stands; None for a break that only follows from another."""
        named: tuple[tuple[Status, tuple[Finding, ...]], ...] = (
            ("new", self.new), ("gone", self.gone), ("same", self.same)
        )  # fmt: skip
        return next((name for name, group in named if any(f.record is record for f in group)), None)


def findings(audit: Audit, *, all_breaks: bool = False) -> list[Finding]:
    """What a gate counts: breaks that follow from no other, recompile causes, what runs eager.

    Args:
        all_breaks: those that follow from others too.
    """
    roots = (b for b in audit.breaks if all_breaks or b.caused_by is None)
    found = [Finding("break", record, audit.root) for record in roots]
    found += [Finding("recompile", record, audit.root) for record in audit.recompiles]
    return found + [Finding("silent eager", record, audit.root) for record in audit.silent_eager]


def compare(before: Audit, after: Audit) -> Difference:
    """The difference from a baseline to an audit, as multisets: a second equal line is new where there was one.

    A break that only followed from another in the baseline, and stands alone now, is not new.
    """
    old, now = findings(before), findings(after)
    known = Counter(f.key for f in findings(before, all_breaks=True))
    new, same = _split(now, known)
    gone, _ = _split(old, Counter(f.key for f in findings(after, all_breaks=True)))
    captured = _captured(before, after)
    return Difference(
        new=(*new, *(f for f, worse in captured if worse)),
        gone=(*gone, *(f for f, worse in captured if not worse)),
        same=tuple(same),
        counts=_counts(before, after),
    )


def _split(items: Iterable[Finding], known: Counter[tuple[str, ...]]) -> tuple[list[Finding], list[Finding]]:
    """Those that are not among `known`, and those that are; each known one is used once."""
    left = known.copy()
    new: list[Finding] = []
    same: list[Finding] = []
    for item in items:
        if left[item.key] > 0:
            left[item.key] -= 1
            same.append(item)
        else:
            new.append(item)
    return new, same


def _captured(before: Audit, after: Audit) -> list[tuple[Finding, bool]]:
    """A finding, and whether it is for the worse, where the share of operations in graphs changed."""
    a, b = before.summary.ops_captured_fraction, after.summary.ops_captured_fraction
    if a is None or b is None or abs(a - b) <= TOLERANCE:
        return []
    told = f"tensor operations in graphs: {percent(a)} -> {percent(b)}"
    return [(Finding("ops captured", None, after.root, told), b < a)]


def _counts(before: Audit, after: Audit) -> tuple[tuple[str, str, str], ...]:
    def share(value: float | None) -> str:
        return percent(value) if value is not None else "-"

    old, now = before.summary, after.summary
    rows = [
        ("graphs", str(old.graphs), str(now.graphs)),
        ("graph breaks", str(old.breaks), str(now.breaks)),
        ("recompiles", str(old.recompiles), str(now.recompiles)),
        ("silent eager", str(old.silent_eager), str(now.silent_eager)),
        ("operations in graphs", share(old.ops_captured_fraction), share(now.ops_captured_fraction)),
    ]
    return tuple(rows)
