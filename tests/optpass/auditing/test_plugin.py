"""The pytest plugin, in sessions of its own: fixture, marker, the gate over a session, workers of pytest-xdist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from optpass.reporting.audit.files import read

TESTS = """
    import pytest, torch

    def bad(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    def compiled(function):
        torch.compiler.reset()
        return torch.compile(function, backend="eager")(torch.ones(3))

    def test_fixture_passes(audit):
        compiled(torch.relu)
        compiled(lambda x: x + 1)
        audit.assert_no_breaks()

    def test_fixture_fails(audit):
        compiled(bad)
        audit.assert_no_breaks()

    @pytest.mark.no_graph_breaks
    def test_marker_passes():
        compiled(lambda x: x + 1)

    @pytest.mark.no_graph_breaks
    def test_marker_fails():
        compiled(bad)

    @pytest.mark.no_graph_breaks
    def test_marker_leaves_other_failures_alone():
        compiled(bad)
        assert 1 == 2
"""
GATED = """
    import os, torch

    def old(x):
        torch._dynamo.graph_break()
        return x + 1

    def test_one():
        torch.compile(old, backend="eager")(torch.ones(3))

    def test_two():
        if os.environ.get("MORE"):
            torch.compile(lambda x: (torch._dynamo.graph_break(), x * 3)[1], backend="eager")(torch.ones(3))
"""


def session(folder: Path, text: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A pytest session over one file of tests, of which nothing but the result is kept."""
    (folder / "pyproject.toml").touch()
    (folder / "test_it.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", "--show-capture=no"]
    return subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=300, cwd=folder, env=dict(os.environ) | environ
    )


@pytest.mark.slow
def test_fixture_and_marker(tmp_path: Path) -> None:
    done = session(tmp_path, TESTS, "--tb=short")
    failed = re.findall(r"^FAILED test_it.py::(\w+)", done.stdout, re.MULTILINE)
    assert failed == ["test_fixture_fails", "test_marker_fails", "test_marker_leaves_other_failures_alone"], done.stdout
    # Not in the summary below the failures, which repeats messages in full where pytest finds itself in CI.
    told = done.stdout.partition("short test summary info")[0]
    assert told.count("test_it.py:6:5 in bad: GB0025") == 2 and "assert 1 == 2" in told, done.stdout
    assert "optpass audit" not in done.stdout, "no session audit unless asked"


@pytest.mark.slow
def test_the_gate_over_a_session(tmp_path: Path) -> None:
    baseline = ("--optpass-audit-baseline", "base/audit.json")
    done = session(tmp_path, GATED, *baseline)
    assert done.returncode == 4 and done.stderr.count("\n") <= 2
    assert "base/audit.json: no such file" in done.stderr and "--optpass-audit-update" in done.stderr

    done = session(tmp_path, GATED, *baseline, "--optpass-audit-update")
    assert done.returncode == 0, done.stdout
    written = read(tmp_path / "base" / "audit.json")
    assert [b.function for b in written.breaks] == ["old"] and written.root == str(tmp_path)

    # Another line above, another process each: the known break is the same, the new one fails the session.
    written_too = ("--optpass-audit", "now.sarif")
    done = session(tmp_path, "\n    # moved\n" + GATED, *baseline, "-n", "2", *written_too, MORE="1")
    assert done.returncode == 1 and "2 passed" in done.stdout, done.stdout
    assert "against the baseline: 1 new, 0 gone, 1 the same" in done.stdout
    assert re.search(r"^new: test_it\.py:\d+:\d+ in test_two.<locals>.<lambda>: GB0025", done.stdout, re.MULTILINE)
    assert '"baselineState": "new"' in (tmp_path / "now.sarif").read_text()


def test_it_is_inert_unless_asked(tmp_path: Path) -> None:
    """A session without torch stays without it, and without anything heavy of ours."""
    text = """
        import sys

        def test_light():
            loaded = {name for name in sys.modules if name.startswith("optpass")}
            assert loaded <= {"optpass", "optpass.auditing", "optpass.auditing.plugin"}, loaded
            assert not {"torch", "pydantic", "jinja2"} & set(sys.modules)
    """
    done = session(tmp_path, text)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--optpass-audit-update",), "--optpass-audit-update needs --optpass-audit-baseline PATH"),
        (("--optpass-audit", "a.txt"), "no view is written as '.txt'"),
        (("--optpass-audit-baseline", "bad.json"), "its schema is 'optpass.audit/9'"),
    ],
)
def test_bad_flags_are_usage_errors(tmp_path: Path, flags: tuple[str, ...], expected: str) -> None:
    (tmp_path / "bad.json").write_text('{"schema": "optpass.audit/9"}')
    done = session(tmp_path, "def test_it(): pass", *flags)
    assert done.returncode == 4 and expected in done.stderr and "Traceback" not in done.stderr
