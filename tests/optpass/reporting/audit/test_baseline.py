"""New, gone and the same: across moved lines, another folder, counts and cascades."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optpass.reporting.audit.baseline import compare, findings
from optpass.reporting.audit.model import Audit, Break


def moved(made: Audit, by: int) -> Audit:
    for record in (*made.breaks, *made.recompiles, *made.silent_eager):
        record.line = (record.line or 0) + by
    return made


def test_moved_lines_of_a_copy_elsewhere_are_the_same(new_audit: Callable[..., Audit], tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    before, after = (new_audit(folder) for folder in folders)
    difference = compare(before, moved(after, 10))
    assert (len(difference.new), len(difference.gone), len(difference.same)) == (0, 0, 3)
    assert difference.headline() == "against the baseline: 0 new, 0 gone, 3 the same"
    assert {difference.status(finding.record) for finding in findings(after) if finding.record} == {"same"}


def test_each_kind_can_be_new_and_gone(audit: Audit) -> None:
    empty = Audit(root=audit.root)
    assert [f.kind for f in compare(empty, audit).new] == ["break", "recompile", "silent eager"]
    assert [f.kind for f in compare(audit, empty).gone] == ["break", "recompile", "silent eager"]
    assert [f.line() for f in compare(empty, audit).new] == [
        "train.py:5:8 in step (blocks.0): GB0170 Data-dependent branching",
        "train.py:3 in step: recompiled, float: scale 0.5 -> 0.25",
        "train.py:9 in wide: runs eager, skip poisoned, 7 calls ran eager since",
    ]


def test_what_makes_a_break_another(audit: Audit) -> None:
    for change in ({"code": "if y.mean() > 0:"}, {"function": "other"}, {"gb_type": "x"}, {"file": "/other.py"}):
        after = audit.model_copy(deep=True)
        after.breaks[0] = after.breaks[0].model_copy(update=change)
        difference = compare(audit, after)
        assert [f.record for f in difference.new] == [after.breaks[0]], change
        assert [f.record for f in difference.gone] == [audit.breaks[0]], change


def test_equal_lines_are_counted(audit: Audit) -> None:
    after = audit.model_copy(deep=True)
    after.breaks.append(after.breaks[0].model_copy(update={"line": 99, "occurrences": 50}))
    difference = compare(audit, after)
    assert len(difference.new) == 1 and len(compare(after, audit).gone) == 1
    after.breaks.pop()
    after.breaks[0].occurrences = 99
    assert compare(audit, after).new == ()


def test_a_cascade_that_stands_alone_now_is_not_new(audit: Audit) -> None:
    after = audit.model_copy(deep=True)
    alone: Break = after.breaks[1].model_copy(update={"caused_by": None})
    after.breaks = [alone]
    difference = compare(audit, after)
    assert difference.new == () and [f.record for f in difference.gone] == [audit.breaks[0]]


def test_a_fall_of_the_captured_share_is_new(audit: Audit) -> None:
    after = audit.model_copy(deep=True)
    after.summary.ops_captured_fraction = 0.825
    assert compare(audit, after).new == ()
    after.summary.ops_captured_fraction = 0.7
    assert [f.line() for f in compare(audit, after).new] == ["tensor operations in graphs: 83.0% -> 70.0%"]
    assert compare(after, audit).new == () and len(compare(after, audit).gone) == 1
