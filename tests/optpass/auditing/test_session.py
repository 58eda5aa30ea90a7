"""`optpass.audit()`: what it sees, its gates, its views; in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import optpass
from optpass.errors import AuditError
from optpass.reporting.audit.files import read


def clean(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def compiled(function: object) -> object:
    torch.compiler.reset()
    return torch.compile(function, backend="eager")  # type: ignore[call-overload]


def test_breaks_are_seen_told_and_gated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with optpass.audit(target="a test") as a:
        compiled(broken)(torch.ones(3))  # type: ignore[operator]
    (found,) = a.breaks
    line = Path(__file__).read_text().splitlines().index("    torch._dynamo.graph_break()") + 1
    assert (found.file, found.line, found.function) == (__file__, line, "broken")
    assert found.code == "torch._dynamo.graph_break()"
    assert a.summary.breaks == 1 and a.summary.graphs == 2 and any(f.function == "broken" for f in a.functions)
    with pytest.raises(AssertionError) as caught:
        a.assert_no_breaks()
    text = str(caught.value)
    assert text.startswith("1 graph break\n") and f"test_session.py:{line}:" in text and found.reason in text
    with pytest.raises(AssertionError, match="1 finding"):
        a.assert_clean()
    a.assert_no_recompiles()
    a.assert_no_silent_eager()
    assert capsys.readouterr() == ("", "")

    assert json.loads(a.to_json())["summary"]["breaks"] == 1 and "1 graph break" in repr(a)
    for name in ("a.json", "a.html", "a.sarif", "a.md"):
        a.save(tmp_path / name)
    assert read(tmp_path / "a.json") == a.result()
    assert json.loads((tmp_path / "a.sarif").read_text())["version"] == "2.1.0"
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "a.md").read_text().startswith("### optpass audit")
    with pytest.raises(AuditError, match=r"'\.txt'"):
        a.save(tmp_path / "a.txt")
    page = a._repr_html_()
    assert page is not None and page.startswith("<iframe") and "&lt;!DOCTYPE html&gt;" in page

    assert a.assert_no_new(tmp_path / "a.json").new == ()
    with optpass.audit() as later:
        compiled(clean)(torch.ones(3))  # type: ignore[operator]
    with pytest.raises(AssertionError, match=r"1 new finding\n.*in broken"):
        a.assert_no_new(later.result())


def test_recompiles_are_gated() -> None:
    with optpass.audit() as a:
        run = compiled(lambda x, n: x * n)
        for n in (2, 3):
            run(torch.ones(3), n)  # type: ignore[operator]
    a.assert_no_breaks()
    assert a.summary.recompiles == 1 and a.recompiles[0].cause == "int"
    with pytest.raises(AssertionError, match="1 recompile cause"):
        a.assert_no_recompiles()


def test_an_exception_marks_it_partial_and_passes_through() -> None:
    a = optpass.audit()
    with pytest.raises(ValueError, match="no luck"), a:
        compiled(clean)(torch.ones(3))  # type: ignore[operator]
        raise ValueError("no luck")
    assert a.result().partial == "ValueError: no luck" and a.summary.graphs == 1


def test_it_can_be_read_while_it_runs_and_nested() -> None:
    with optpass.audit() as outer:
        compiled(clean)(torch.ones(3))  # type: ignore[operator]
        assert outer.summary.graphs == 1 and "so far" in repr(outer)
        with optpass.audit(reset=True) as inner:
            torch.compile(broken, backend="eager")(torch.ones(3))
    assert outer.summary.graphs == 3 and inner.summary.graphs == 2
    assert len(outer.breaks) == len(inner.breaks) == 1
    torch.compile(broken, backend="eager", dynamic=True)(torch.ones(4))
    assert outer.summary.graphs == 3, "stopped, it sees nothing more"


def test_a_gate_that_saw_nothing_says_so() -> None:
    run = compiled(broken)
    run(torch.ones(3))  # type: ignore[operator]
    with optpass.audit() as a:
        pass
    with pytest.warns(UserWarning, match="nothing was compiled while the audit ran"):
        a.assert_no_breaks()
    with optpass.audit(reset=True) as a:
        run(torch.ones(3))  # type: ignore[operator]
    with pytest.raises(AssertionError):
        a.assert_no_breaks()


def test_misuse_is_an_error() -> None:
    a = optpass.audit()
    assert repr(a) == "<optpass.audit: not started>" and a._repr_html_() is None
    with pytest.raises(AuditError, match="has not been started"):
        _ = a.breaks
    with a, pytest.raises(AuditError, match="started already"):
        a.start()


def test_naming_it_imports_no_torch() -> None:
    text = "import optpass, sys; optpass.audit(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
