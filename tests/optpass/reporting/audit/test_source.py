"""Paths from the project's root, code frames, and what moved lines do to them."""

from __future__ import annotations

from pathlib import Path

from optpass.reporting.audit.model import Audit, SilentEager
from optpass.reporting.audit.source import frame, place, project_root, relative


def test_the_root_is_the_nearest_folder_with_a_mark(tmp_path: Path) -> None:
    inner = tmp_path / "project" / "a" / "b"
    inner.mkdir(parents=True)
    assert project_root(inner) == inner
    (tmp_path / "project" / "pyproject.toml").touch()
    assert project_root(inner) == tmp_path / "project"
    (inner.parent / ".git").mkdir()
    assert project_root(inner) == inner.parent


def test_paths_are_told_from_the_root_or_from_site_packages(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert relative(f"{root}/pkg/mod.py", root) == "pkg/mod.py"
    assert relative("/usr/lib/python3/site-packages/torch/nn/a.py", root) == "torch/nn/a.py"
    assert relative("/elsewhere/a.py", root) == "/elsewhere/a.py"
    for python in ("/usr/lib/python3.12", "/root/.pyenv/versions/3.11.7/lib/python3.11", "/opt/lib64/python3.13"):
        assert relative(f"{python}/copy.py", root) == "copy.py"
        assert relative(f"{python}/logging/__init__.py", root) == "logging/__init__.py"
    assert relative("<ipython-input-3>", root) == "<ipython-input-3>"
    assert place(f"{root}/a.py", 3, root, 5) == "a.py:3:5" and place(None, 3) == "" and place("a.py", None) == "a.py"


def test_the_caret_stands_under_the_expression(audit: Audit) -> None:
    shown = frame(audit.breaks[0])
    assert shown is not None and shown.text() == (
        "4 | y = x * scale\n5 | if y.sum() > 0:\n  |    ^^^^^^^^^^^"
    )  # fmt: skip
    assert audit.breaks[0].code == "if y.sum() > 0:"
    # Without an end, the caret is one character; without a column there is none.
    one = frame(audit.breaks[1])
    assert one is not None and one.text().endswith('\n6 |     print("positive")\n  |     ^')
    audit.breaks[1].column = None
    assert "^" not in (frame(audit.breaks[1]) or one).text()


def test_a_line_that_changed_since_is_shown_as_it_was(audit: Audit, tmp_path: Path) -> None:
    audit.breaks[0].line += 1
    shown = frame(audit.breaks[0])
    assert shown is not None and shown.text() == "6 | if y.sum() > 0:"
    assert frame(SilentEager(kind="compile disabled")) is None
    assert frame(audit.breaks[0].model_copy(update={"file": str(tmp_path / "gone.py"), "code": ""})) is None
