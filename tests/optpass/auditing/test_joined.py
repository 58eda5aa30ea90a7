"""Python programs that a program starts by `subprocess` join its audit, and notice nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from optpass.auditing.joined import interpreter_flags
from optpass.auditing.runner import Job, run

TRAIN = """\
import os, sys, torch
def bad(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2
torch.compile(bad, backend="eager")(torch.ones(3))
print(sys.argv, os.environ.get("RANK"), flush=True)
"""
SEES = """\
import os, signal, sys
class Thing: pass
import pickle
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(sys.argv, sys.path[0], __name__, __file__, sys.modules["__main__"].__dict__ is globals(), __package__)
print(sorted(set(os.environ) - {"OPTPASS_RUN_ID"}), sys.stdin.read(), os.getcwd())
print([m for m in ("torch", "pydantic", "optpass.backend") if m in sys.modules])
if "raise" in sys.argv:
    raise ValueError("no luck")
sys.exit(7)
"""
LAUNCHES = """\
import os, subprocess, sys
from pathlib import Path
def start(*command, **options):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, input="in", **options)
    print(done.args, done.returncode, done.stdout, done.stderr.replace(HERE, "HERE"))
HERE = os.path.dirname(os.path.abspath(__file__))
start("sees.py", "--lr", "1", "-m", cwd=HERE)
start(Path(HERE, "sees.py"), "raise")
start("-u", "-X", "dev=0", "-Wignore", "-m", "sees", cwd=HERE)
start("-I", "sees.py", cwd=HERE)
start("sees.py", cwd=HERE, env={"A": "b"})
start("-m", "no_such")
start("none.py")
start("-c", "import sys; print(sys.orig_argv)")
start("-", "x")
start("-V")
"""


def test_they_see_what_they_would_without_us(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    path = tmp_path / "launch.py"
    path.write_text(LAUNCHES)
    alone = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    ended = run(Job(str(path)))
    told = capfd.readouterr()
    assert ended.code == alone.returncode == 0
    assert told.out.splitlines() == alone.stdout.splitlines() and told.err == alone.stderr
    assert ended.audit is None


@pytest.mark.slow
def test_what_they_compile_is_told_also_where_they_are_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun` starts its ranks so; it compiles nothing itself."""
    for name in ("RANK", "WORLD_SIZE", "OPTPASS_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    ended = run(
        Job("torch.distributed.run", True, ("--standalone", "--nproc-per-node", "2", str(tmp_path / "train.py"), "a"))
    )
    out = sorted(capfd.readouterr().out.splitlines())
    assert out == [f"['{tmp_path / 'train.py'}', 'a'] {rank}" for rank in "01"]
    assert ended.code == 0 and ended.compiled and ended.audit is not None
    (brk,) = ended.audit.breaks
    assert (brk.function, brk.line, brk.occurrences) == ("bad", 4, 2)
    ranks = [p.rank for p in ended.audit.processes if p.world_size == 2]
    assert ranks == [0, 1]
    assert "with what 2 processes compiled that the program started" in ended.audit.notes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.py"], 0), (["-u", "a.py", "-c"], 1), (["-uB", "-X", "dev", "a.py"], 3), (["-Xdev", "-m", "a"], 1),
        (["-W", "error", "-OO", "a.py"], 3), (["-uX", "dev", "a.py"], 2), (["-c", "x"], None), (["-", "a"], None),
        (["-I", "a.py"], None), (["-uE", "a.py"], None), (["-m"], None), ([], None), (["-u"], None),
        (["-i", "a"], None), (["--version"], None), (["-X"], None),
    ],
)  # fmt: skip
def test_options_of_the_interpreter(arguments: list[str], expected: int | None) -> None:
    assert interpreter_flags(arguments) == expected
