"""`optpass audit`: flags, files, exit codes and signals. Runs go through the console script's own entry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from optpass.cli.app import run
from optpass.reporting.audit.files import read, write
from optpass.reporting.audit.model import Audit, Break
from optpass.reporting.model import ProcessRecord

BREAKS = """
import sys, time, torch
@torch.compile(backend="eager")
def f(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2
print("out", f(torch.ones(2)).sum().item(), sys.argv[1:], flush=True)
if "more" in sys.argv:
    torch.compile(lambda x: (torch._dynamo.graph_break(), x * 3)[1], backend="eager")(torch.ones(3))
if "wait" in sys.argv:
    time.sleep(60)
"""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "optpass", "audit", *map(str, arguments)]


def audit(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=180, cwd=cwd)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BREAKS)
    return path


@pytest.mark.slow
def test_everything_is_written_and_the_output_stays_the_programs(program: Path, tmp_path: Path) -> None:
    files = ("--json", "a.json", "--html", "a.html", "--sarif", "a.sarif", "--markdown", "a.md")
    done = audit("train.py", *files, "--fail-on", "any", "--", "--own", "-x", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "out 8.0 ['--own', '-x']\n"
    for words in ("optpass audit: train.py --own -x\n", "1. train.py:6:5 in f\n", "6 | torch._dynamo.graph_break()\n",
                  "wrote a.json\n", "failed: 1 finding "):  # fmt: skip
        assert words in done.stderr, done.stderr
    made = read(tmp_path / "a.json")
    assert made.exit_code == 0 and made.partial is None and made.root == str(tmp_path)
    assert all((tmp_path / name).stat().st_size > 500 for name in ("a.html", "a.sarif", "a.md"))

    # The gate: moved lines are the same, another break is new; JSON alone on standard output.
    program.write_text("# moved\n\n" + BREAKS)
    gate = ("--baseline", "a.json", "--fail-on", "new")
    done = audit("train.py", *gate, "--json", "-", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["breaks"][0]["line"] == 8
    assert done.stderr == "out 8.0 []\n"
    done = audit("train.py", "more", *gate, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "out 8.0 ['more']\n"
    assert "Against the baseline: 1 new, 0 gone, 1 the same" in done.stderr
    assert "new: train.py:12:" in done.stderr and "failed: 1 new finding (--fail-on new)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_a_signal_reaches_the_program_and_the_report_is_there(program: Path, tmp_path: Path, number: int) -> None:
    arguments = command("train.py", "--json", "a.json", "--fail-on", "any", "--", "wait")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "out 8.0 ['wait']\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == -number
    assert errors.count("KeyboardInterrupt") == (1 if number == signal.SIGINT else 0)
    assert "child.py" not in errors and f"interrupted ({signal.Signals(number).name})" in errors
    made = read(tmp_path / "a.json")
    assert made.exit_code == -number and made.partial and len(made.breaks) == 1


def test_a_program_that_is_killed_ends_us_alike(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = audit("killed.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL and "Traceback" not in done.stderr


def test_a_program_that_compiles_nothing_is_exit_4(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')")
    done = audit("plain.py", "--json", "a.json", cwd=tmp_path)
    assert done.returncode == 4 and done.stdout == "hello\n"
    assert "plain.py never called a function compiled by torch.compile" in done.stderr
    assert "Traceback" not in done.stderr and read(tmp_path / "a.json").functions == []
    # What it says itself goes first.
    (tmp_path / "plain.py").write_text("import sys; sys.exit(3)")
    assert audit("plain.py", cwd=tmp_path).returncode == 3


@pytest.mark.slow
def test_ranks_of_torchrun_make_one_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BREAKS + "import os; assert os.environ['RANK'] in '01'\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*launcher, "--rdzv-endpoint", "localhost:0", "-m", "optpass", "audit", "train.py", "--json", "a.json"],
        capture_output=True, text=True, timeout=240, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = read(tmp_path / "a.json")
    assert [(p.rank, p.world_size) for p in made.processes] == [(0, 2), (1, 2)]
    assert [(b.line, b.occurrences) for b in made.breaks] == [(6, 2)] and made.summary.graphs == 4
    assert done.stderr.count("optpass audit: train.py") == 1, "told once"


def test_bad_input_is_one_line(program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before the program runs, whatever can be known to fail then."""
    bad, odd = tmp_path / "bad.py", tmp_path / "odd.json"
    bad.write_text("def (:")
    odd.write_text('{"schema": "optpass.audit/9"}')
    for arguments, expected in (
        ((), "no program given"),
        (("none.py",), "none.py: no such file"),
        ((tmp_path,), "is a folder"),
        ((bad,), "not Python: invalid syntax at line 1"),
        (("-m", "no_such_module_x"), "-m no_such_module_x: no such module"),
        ((program, "--baseline", tmp_path / "none.json"), "no such file"),
        ((program, "--baseline", bad), "not JSON"),
        ((program, "--baseline", odd), "its schema is 'optpass.audit/9', expected 'optpass.audit/1'"),
        ((program, "--fail-on", "new"), "--fail-on new needs --baseline"),
        ((program, "--fail-on", "sometimes"), "sometimes"),
        ((program, "--steps", "0"), "Invalid value for '--steps'"),
        ((program, "--html", tmp_path), "is a folder"),
        ((program, "--html", "-"), "give a file"),
        ((program, "--lr", "1"), "--lr"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(["audit", *map(str, arguments)])
        captured = capfd.readouterr()
        assert caught.value.code == 2 and captured.out == "", (arguments, captured)
        assert expected in captured.err and captured.err.count("\n") == 1, (arguments, captured.err)


def test_report_shows_and_merges_audits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [tmp_path / f"{rank}.json" for rank in (0, 1)]
    for rank, path in enumerate(parts):
        made = Audit(target="train.py", processes=[ProcessRecord(pid=rank, host="here", rank=rank)])
        made.breaks = [Break(file="train.py", line=3, function="f", gb_type="x", reason="Because.", occurrences=2)]
        write(made, path)
    with pytest.raises(SystemExit) as caught:
        run(["report", *map(str, parts), "--html", str(tmp_path / "a.html")])
    captured = capsys.readouterr()
    assert not caught.value.code and "1. train.py:3 in f  x4\n" in captured.out
    assert (tmp_path / "a.html").is_file() and captured.err == f"wrote {tmp_path / 'a.html'}\n"
    (tmp_path / "report.json").write_text('{"schema": "optpass.report/1"}')
    with pytest.raises(SystemExit):
        run(["report", str(parts[0]), str(tmp_path / "report.json")])
    assert "not an audit that this version reads" in capsys.readouterr().err
