"""Unified diffs: what is made can be applied, to the right text only; files are written whole."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpass.auditing.fixes import patch
from optpass.errors import AuditError

TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "-x\n", "@@ -1 +1 @@\n", "d"]), max_size=12).map("".join)


@settings(max_examples=200, deadline=None)
@given(before=TEXTS, after=TEXTS)
def test_what_is_made_is_applied(before: str, after: str) -> None:
    """For any two texts, with and without a newline at the end."""
    assert patch.applied(patch.unified("f.py", before, after), before) == after


def test_diff_does_not_fit_another_text() -> None:
    """A line changed since raises, and says where."""
    diff = patch.unified("f.py", "a\nb\nc\n", "a\nB\nc\n")
    with pytest.raises(AuditError, match="line 1"):
        patch.applied(diff, "a\nx\nc\n")


def test_lines_are_found_again() -> None:
    """Kept lines move; replaced lines are all lines in their place; deleted lines are nowhere."""
    place = patch.line_map("a\nb\nc\nd\n", "new\na\nB1\nB2\nd\n")
    assert [list(place(line)) for line in (1, 2, 3, 4, 9)] == [[2], [3, 4], [3, 4], [5], []]
    assert list(patch.line_map("a\nb\n", "a\n")(2)) == []


def test_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's path from the root or the working directory; whole where it lies elsewhere."""
    monkeypatch.chdir(tmp_path)
    inside = str(tmp_path / "pkg" / "f.py")
    assert patch.unified(inside, "a\n", "b\n").startswith("--- a/pkg/f.py\n+++ b/pkg/f.py\n")
    assert patch.unified(inside, "a\n", "b\n", str(tmp_path / "pkg")).startswith("--- a/f.py\n")
    assert patch.unified("/else/f.py", "a\n", "b\n").startswith("--- a/else/f.py\n")


def test_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Mode bits stay, a link stays a link, nothing else is left in the folder."""
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    real.chmod(0o751)
    link.symlink_to(real)
    patch.write(link, "new\r\nü", "latin-1")
    assert real.read_bytes() == "new\r\nü".encode("latin-1")
    assert stat.S_IMODE(real.stat().st_mode) == 0o751
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.py", "real.py"]


def test_file_that_cannot_be_encoded_stays(tmp_path: Path) -> None:
    """The old text is there, and no temporary file."""
    path = tmp_path / "f.py"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        patch.write(path, "ü", "ascii")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.py"]
