"""Fixes are tried on copies: what holds is told apart from what does not, and only what holds is ever written."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.auditing import verify
from optpass.auditing.comparison import compare
from optpass.auditing.fixes.attach import attach_diffs
from optpass.auditing.runner import Ended, Job, run
from optpass.auditing.verify import verify_fixes
from optpass.backend.audit.outputs import OutputCollector, leaves
from optpass.errors import AuditError
from optpass.reporting.audit.model import Audit, Break

SCRIPT = """\
import sys
import torch
import parts


@torch.compile(backend="eager")
def scale(x):
    s = x.abs().sum().item()
    return x / s


net = torch.compile(parts.Net(), backend="eager")
for _ in range(3):
    net(scale(torch.randn(4, 4)))
print("done", sys.argv[1:])
sys.exit(3)
"""

PARTS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(self.fc(x))
        print("mean", x.mean())
        return x.relu()
"""


@pytest.mark.slow
def test_program_is_tried_and_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script and a module of its own, in processes of their own, until fixes in both are written."""
    monkeypatch.chdir(tmp_path)
    script, parts = tmp_path / "train.py", tmp_path / "parts.py"
    script.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    parts.write_text(PARTS)
    parts.chmod(0o640)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        job = Job("train.py", arguments=("--flag",), stdout=out.fileno(), stderr=err.fileno())
        found = run(job).audit
        assert found is not None
        verify_fixes(attach_diffs(found), job, apply=True)
    told = {(Path(b.file).name, b.line): (b.fix.verified, b.fix.outcome) for b in found.breaks if b.fix.diff}
    assert told.keys() == {("train.py", 8), ("parts.py", 13)}
    for verified, outcome in told.values():
        assert verified is True
        assert "the break is gone; outputs of 6 calls are equal" in outcome
        assert "standard output differs" in outcome  # the print is under a guard
    assert script.read_bytes() == SCRIPT.replace("\n", "\r\n").replace(".item()", ".detach()").encode()
    assert "        if not torch.compiler.is_compiling():\n            print(" in parts.read_text()
    assert stat.S_IMODE(parts.stat().st_mode) == 0o640
    assert sum("changed " in note and ": 1 fix" in note for note in found.notes) == 2


# ---- what is told of a run, with runs that are made up -------------------------------------------------------------

PROGRAM = """\
import torch
def f(x):
    s = x * 2
    print(s)
    return s
def g(x):
    print(x)
    return x
"""

Answer = Callable[[dict[str, str]], tuple[list[Break], list[Any], int]]


def _print_break(line: int, function: str, **more: Any) -> Break:
    facts = {"gb_type": "Failed to trace builtin operator", "reason": "r", "line": line, "function": function}
    return Break.model_validate({"file": "program.py", "column": 5, "end_line": line, "end_column": 13} | facts | more)


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Verify fixes of PROGRAM with runs that answer as told: breaks, outputs and exit code by the texts in place."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)

    def go(
        answer: Answer, *, lines: tuple[int, ...] = (4,), apply: bool = False, effect: str = ""
    ) -> tuple[Audit, int]:
        runs = 0

        def made_up(job: Job) -> Ended:
            nonlocal runs
            runs += 1
            assert job.trial is not None
            control = json.loads(job.trial.read_text())
            texts = {Path(file).name: Path(copy).read_text() for file, copy in control["files"].items()}
            breaks, outputs, code = answer(texts)
            calls = [dict(leaves(value, "result")) for value in outputs]
            torch.save({"calls": calls, "problem": None}, control["outputs"])
            return Ended(Audit(breaks=breaks), code)

        monkeypatch.setattr(verify, "run", made_up)
        names = {4: "f", 7: "g"}
        found = attach_diffs(Audit(breaks=[_print_break(line, names[line], effect=effect) for line in lines]))
        assert all(brk.fix.diff for brk in found.breaks)
        return verify_fixes(found, Job("program.py"), apply=apply), runs

    return go


def test_holds(tried: Callable[..., Any]) -> None:
    """Gone, and the outputs are equal within what rounding makes of them."""
    found, runs = tried(lambda t: ([] if t else [_print_break(4, "f")], [torch.ones(3) * (1 + 1e-6 * bool(t))], 0))
    assert found.breaks[0].fix.verified is True
    assert "the break is gone; outputs of 1 call are equal (largest difference 9" in found.breaks[0].fix.outcome
    assert runs == 2
    assert Path("program.py").read_text() == PROGRAM


def test_still_there(tried: Callable[..., Any]) -> None:
    """The same kind of break in the lines that stand in its place."""
    found, _ = tried(lambda t: ([_print_break(5 if t else 4, "f")], [1.0], 0))
    assert found.breaks[0].fix.verified is False
    assert "the break is still there" in found.breaks[0].fix.outcome


def test_not_met_again(tried: Callable[..., Any]) -> None:
    """A break that the unchanged program does not meet again would be gone with any change: it is not tried."""
    found, runs = tried(lambda t: ([] if t else [_print_break(7, "g")], [1.0], 0), lines=(4, 7))
    assert (found.breaks[0].fix.verified, found.breaks[1].fix.verified) == (None, True)
    assert "not tried: run once more, unchanged" in found.breaks[0].fix.outcome
    assert runs == 2


def test_another_comes_in_its_place(tried: Callable[..., Any]) -> None:
    """A break of another kind, further down in that function, that was not there before."""
    found, _ = tried(lambda t: ([_print_break(6, "f", gb_type="Other")] if t else [_print_break(4, "f")], [1.0], 0))
    assert found.breaks[0].fix.verified is False
    assert "this break is gone, but there is another at line 5: Other" in found.breaks[0].fix.outcome


def test_what_stood_behind_comes_to_light(tried: Callable[..., Any]) -> None:
    """Dynamo had given up on the function there, so a later break is no fault of the fix."""
    old = _print_break(4, "f", effect="frame eager")
    found, _ = tried(
        lambda t: ([_print_break(6, "f", gb_type="Other")] if t else [old], [1.0], 0), effect="frame eager"
    )
    assert found.breaks[0].fix.verified is True
    assert "the break is gone; behind it there is another at line 5: Other" in found.breaks[0].fix.outcome


def test_break_of_another_function_is_no_matter(tried: Callable[..., Any]) -> None:
    """What breaks elsewhere breaks as before."""
    other = _print_break(7, "g")
    moved = other.model_copy(update={"line": 8, "end_line": 8})
    found, _ = tried(lambda t: ([moved] if t else [_print_break(4, "f"), other], [1.0], 0))
    assert found.breaks[0].fix.verified is True


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            torch.ones(3),
            torch.ones(3) * 1.1,
            r"result of call 1 differs by 1.0e-01 of the largest value, 1e-04 allowed",
        ),
        (torch.ones(3), torch.ones(4), r"has shape [4], [3] before"),
        (torch.ones(3), torch.ones(3).half(), r"has dtype torch.float16, torch.float32 before"),
        (torch.ones(3), 1.0, "is 1.0, a tensor before"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "differs by inf"),
        (torch.arange(3), torch.arange(3).flip(0), "0e+00 allowed"),
        (2, 3, "is 3, 2 before"),
        ([1, 2], [1], "another structure"),
    ],
)
def test_outputs_differ(before: Any, after: Any, told: str, tried: Callable[..., Any]) -> None:
    """What is different is told: value, shape, dtype, kind, structure."""
    found, _ = tried(lambda t: ([] if t else [_print_break(4, "f")], [after if t else before], 0))
    assert found.breaks[0].fix.verified is False
    assert "the break is gone; outputs differ: " in found.breaks[0].fix.outcome
    assert told in found.breaks[0].fix.outcome


def test_program_that_never_computes_the_same(tried: Callable[..., Any]) -> None:
    """Outputs differ between two runs of the unchanged program: nothing can be said."""
    found, _ = tried(lambda t: ([] if t else [_print_break(4, "f")], [torch.rand(3)], 0))
    assert found.breaks[0].fix.verified is None
    assert "differ from run to run even unchanged" in found.breaks[0].fix.outcome


def test_program_that_then_fails(tried: Callable[..., Any]) -> None:
    """Another exit code."""
    found, _ = tried(lambda t: ([] if t else [_print_break(4, "f")], [1.0], 1 if t else 0))
    assert found.breaks[0].fix.verified is False
    assert "exit code 1, 0 before" in found.breaks[0].fix.outcome


def test_nothing_to_compare(tried: Callable[..., Any]) -> None:
    """No compiled function returned: gone, but equality is not known."""
    found, _ = tried(lambda t: ([] if t else [_print_break(4, "f")], [], 0))
    assert found.breaks[0].fix.verified is None
    assert "no outputs of compiled functions could be compared" in found.breaks[0].fix.outcome


def _one_bad(texts: dict[str, str]) -> tuple[list[Break], list[Any], int]:
    """The fix in `g` changes the outputs."""
    text = texts.get("program.py", PROGRAM)
    bad = "        print(x)" in text
    first = "        print(s)" not in text
    breaks = [_print_break(4, "f")] * first + [_print_break(8 if not first else 7, "g")] * (not bad)
    return breaks, [2.0 if bad else 1.0], 0


def test_one_bad_fix_does_not_spoil_the_other(tried: Callable[..., Any]) -> None:
    """Where they do not hold together, each is tried alone; only the good one is written."""
    found, _ = tried(_one_bad, lines=(4, 7), apply=True)
    assert [b.fix.verified for b in found.breaks] == [True, False]
    after = Path("program.py").read_text()
    assert "        print(s)" in after and "        print(x)" not in after


def test_file_changed_since_the_audit(tried: Callable[..., Any]) -> None:
    """Its diff does not fit: nothing is tried, nothing is written."""
    found = attach_diffs(Audit(breaks=[_print_break(4, "f")]))
    Path("program.py").write_text("# new\n" + PROGRAM)
    verify_fixes(found, Job("program.py"), apply=True)
    assert "was changed since the audit" in found.breaks[0].fix.outcome
    assert Path("program.py").read_text() == "# new\n" + PROGRAM


def test_file_changed_while_fixes_are_tried(tried: Callable[..., Any]) -> None:
    """Refused, and the change stays."""

    def answer(texts: dict[str, str]) -> tuple[list[Break], list[Any], int]:
        Path("program.py").write_text("# edited\n")
        return ([] if texts else [_print_break(4, "f")]), [1.0], 0

    with pytest.raises(AuditError, match=r"program\.py was changed while"):
        tried(answer, apply=True)
    assert Path("program.py").read_text() == "# edited\n"


def test_outputs_are_collected_from_outermost_calls() -> None:
    """Calls in calls are left out; what is returned and what was given are both kept."""
    collector = OutputCollector(2)
    inner = torch.compile(lambda x: x + 1, backend="eager")

    def outer(x: torch.Tensor) -> dict[str, Any]:
        torch._dynamo.graph_break()
        return {"a": inner(x), "n": 3}

    compiled = torch.compile(outer, backend="eager")
    collector.install()
    try:
        for _ in range(3):
            compiled(torch.ones(2))
    finally:
        collector.uninstall()
    assert collector.problem is None
    assert [sorted(call) for call in collector.calls] == [["args[0]", "result['a']", "result['n']"]] * 2
    assert collector.calls[0]["result['a']"]["sample"].tolist() == [2.0, 2.0]
    assert compare(collector.calls, collector.calls).equal is True
