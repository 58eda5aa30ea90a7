"""What the diffs do to the text around them: layout, line endings, comments, headers; and where they keep away."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optpass.auditing.fixes import patch
from optpass.auditing.fixes.attach import attach_diffs
from optpass.auditing.fixes.rewrite import proposals, propose, propose_all, propose_with_note
from optpass.reporting.audit.html import render_html
from optpass.reporting.audit.markdown import render_markdown
from optpass.reporting.audit.model import Audit, Break

PROGRAM = '''"""Docstring."""
import torch
from torch import (
    nn,
)


# what it does
@torch.no_grad()
def f(x):
    y = x.sin()  # keep me
    print(
        "über", y.mean(),
    )  # and me
    if y.sum().item() > 0:
        y = y * 2  # doubled
    return y
'''


def _break(line: int, column: int | None = None, kind: str = "Data-dependent branching", **more: Any) -> Break:
    return Break(file="program.py", line=line, column=column, gb_type=kind, reason="r", **more)


def test_layout_is_kept(fix: Callable[..., Any]) -> None:
    """Comments, decorators, calls over several lines and characters outside of ASCII stay where they are."""
    fixed = fix(PROGRAM.replace("import torch\n", "", 1))
    after = patch.applied(fixed.diff, fixed.text)
    assert not fixed.after.breaks
    guard = "    if not torch.compiler.is_compiling():\n"
    assert f'{guard}        print(\n            "über", y.mean(),\n        )  # and me\n' in after
    assert "    # doubled\n    y = torch.where(y.sum() > 0, y * 2, y)\n" in after
    assert "    y = x.sin()  # keep me\n" in after


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
@pytest.mark.parametrize("unit", ["\t", "  "])
def test_line_endings_and_indentation(unit: str, ending: str, fix: Callable[..., Any]) -> None:
    """New lines end and are indented as the file's own."""
    text = PROGRAM.replace("import torch\n", "", 1).replace("    ", unit).replace("\n", ending)
    fixed = fix(text)
    after = patch.applied(fixed.diff, fixed.text)
    assert f"{unit}if not torch.compiler.is_compiling():{ending}{unit * 2}print({ending}" in after
    assert "\r\n" not in after.replace("\r\n", "") and (ending == "\n") == ("\r" not in after)
    assert not fixed.after.breaks


def test_what_to_know_of_a_diff_comes_with_it(run: Callable[..., Any], tmp_path: Path) -> None:
    """And is shown beside it."""
    text = "import torch\ndef f(x):\n    print(x.shape)\n    return x.sin()\n"
    diff, note = propose_with_note(run(text).breaks[0], text)
    assert diff and note == "What stands under the guard does not run in compiled calls."
    (tmp_path / "program.py").write_text(text)
    (brk,) = attach_diffs(Audit(breaks=run(text).breaks)).breaks
    assert (brk.fix.diff, brk.fix.note) == (diff, note)
    for view in (render_html, render_markdown):
        assert note in view(Audit(breaks=[brk]))


def test_no_newline_at_the_end(run: Callable[..., Any]) -> None:
    """A file that ends without a newline is changed as any other."""
    text = "import torch\ndef f(x):\n    s = x.sum().item()\n    return x * s"
    diff = propose(run(text).breaks[0], text)
    assert patch.applied(diff, text) == text.replace("item", "detach")


def test_an_if_of_one_line_that_only_tells(fix: Callable[..., Any]) -> None:
    """It has no lines to put under a guard, so its test gets one; comments stay."""
    fixed = fix(
        "def f(x, loud=True, k=1):\n    y = x.sin()\n"
        '    if loud or k: print("y", y.sum().item())  # why\n    return y\n'
    )
    assert "    if not torch.compiler.is_compiling() and (loud or k): print(" in fixed.diff and ")  # why" in fixed.diff
    assert not fixed.after.breaks


def test_an_if_of_one_line_that_does_more_is_left(fix: Callable[..., Any]) -> None:
    """With an `else`, or with more behind a semicolon, the test decides more than what is told."""
    for rest in ("\n    else: x = x + 1", "; x = x + 1"):
        fixed = fix(f"def f(x, loud=True):\n    x = x.sin()\n    if loud: print('y'){rest}\n    return x\n")
        assert not fixed.diff


def test_string_over_lines_is_not_indented(fix: Callable[..., Any]) -> None:
    """What stands inside of a string stays."""
    fixed = fix('def f(x):\n    print("""a\n  b\n""", x.shape)\n    return x.sin()\n')
    assert '        print("""a\n  b\n""", x.shape)' in patch.applied(fixed.diff, fixed.text)


def test_two_breaks_in_one_line_make_one_change(fix: Callable[..., Any]) -> None:
    """Both want the same guard."""
    fixed = fix("def f(x):\n    print(x.sum().item(), x.max().item())\n    return x.sin()\n")
    assert fixed.diff.count("+    if not") == 1
    assert not fixed.after.breaks


def test_method_of_a_class_in_a_class(fix: Callable[..., Any]) -> None:
    """Deeper functions are changed in place, and a function inside of a function too."""
    fixed = fix(
        "class A:\n    class B:\n        def g(self, x):\n            def h(y):\n                print(y)\n"
        "                return y * 2\n            return h(x)\nf = A.B().g\n"
    )
    assert "                if not torch.compiler.is_compiling():\n                    print(y)\n" in patch.applied(
        fixed.diff, fixed.text
    )
    assert not fixed.after.breaks


def test_imports_and_flags_come_once(fix: Callable[..., Any]) -> None:
    """Two breaks that need the same line behind the imports get it once."""
    fixed = fix(
        "def f(x):\n    n = x.argmax().item()\n    m = x.argmin().item()\n    return x.flatten()[:n].sum(), m\n"
    )
    assert fixed.diff.count("capture_scalar_outputs = True") == 1
    assert not fixed.after.breaks


def test_future_import_stays_first(run: Callable[..., Any]) -> None:
    """An import that is added stands behind the docstring and `from __future__`."""
    text = '"""Doc."""\nfrom __future__ import annotations\n\ndef f(x):\n    print(x)\n    return x.sin()\n'
    after = patch.applied(propose(run(text).breaks[0], text), text)
    assert after.startswith('"""Doc."""\nfrom __future__ import annotations\nimport torch\n')


def test_break_in_a_library_is_fixed_at_the_users_line() -> None:
    """The record's own file and column are the library's."""
    text = "import torch\nimport traceback\ndef f(x):\n    traceback.print_stack()\n    return x.sin()\n"
    brk = _break(206, 13, "skipped", owner="library", user_file="mine.py", user_line=4)
    diff = propose(brk, text)
    assert diff.startswith("--- a/mine.py\n+++ b/mine.py\n")
    assert "+        traceback.print_stack()\n" in diff


def test_of_a_line_only_the_call_that_breaks_is_changed(run: Callable[..., Any]) -> None:
    text = "import copy, json\ndef f(x):\n    return copy.deepcopy(x.detach()) * json.loads('[2]')[0]\n"
    changes: dict[bool, set[str]] = {True: set(), False: set()}
    for brk in run(text).breaks:
        assert brk.user_line == 3
        changes["copy.py" in brk.file] |= {proposal.rewrite for proposal in proposals(brk, text)}
    assert changes == {True: {"clone"}, False: set()}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(x:\n",
        "\x00",
        "x = 1\n",
        "async def f(x):\n    return [i async for i in x]\n",
        "def f(x):\n    return x.sin()\n" * 3,
    ],
)
def test_a_file_that_is_not_the_one_audited_gives_nothing(text: str) -> None:
    """Not Python, too short, or with something else in that line: no diff and no exception."""
    for line in (1, 2, 5, 50):
        for column in (None, 1, 5, 80):
            assert propose(_break(line, column), text) == ""


def test_unknown_break_gives_nothing() -> None:
    """A kind of break that no rewrite knows."""
    text = "import torch\ndef f(x):\n    return unknown(x)\n"
    assert propose(_break(3, 12, "Something new", end_line=3, end_column=22), text) == ""


def test_diffs_apply_with_git(fix: Callable[..., Any], tmp_path: Path) -> None:
    """`git apply` takes what is proposed, from the folder that the headers count from."""
    fixed = fix(PROGRAM.replace("import torch\n", "", 1).replace("\n", "\r\n"))
    (tmp_path / "program.py").write_bytes(fixed.text.encode())
    (tmp_path / "fix.diff").write_bytes(fixed.diff.encode())
    command = ["git", "apply", "--whitespace=nowarn", "fix.diff"]
    subprocess.run(command, cwd=tmp_path, check=True, env={"PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_DIR": "none"})
    assert (tmp_path / "program.py").read_bytes().decode() == patch.applied(fixed.diff, fixed.text)


def test_overlapping_fixes_leave_the_first() -> None:
    """A fix that touches what a costlier one changes is left out."""
    text = "import torch\ndef f(x):\n    if x.sum().item() > 0:\n        x = x * 2\n    return x\n"
    item = _break(3, 8, "Unsupported Tensor.item() call", end_line=3, end_column=22)
    diffs = propose_all([item, item, _break(3, None)], {"program.py": text})
    assert diffs["program.py"].count("+    x = torch.where(x.sum() > 0, x * 2, x)") == 1
    follower = item.model_copy(update={"caused_by": 0})
    assert propose_all([follower], {"program.py": text}) == {}
