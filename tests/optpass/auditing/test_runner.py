"""The program under audit notices nothing; however it ends, its records are there. Most programs here load no torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from optpass.auditing.runner import Ended, Job, check, run
from optpass.errors import AuditError

TORCH = """
import os, sys, signal, torch
def bad(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2
torch.compile(bad, backend="eager")(torch.ones(3))
"""


def script(folder: Path, text: str, name: str = "prog.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


def direct(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd)


SEES = """
    import os, pickle, signal, sys
    class Thing: pass
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    main = sys.modules["__main__"]
    print(sys.argv, sys.path[0], __name__, __file__, main.__dict__ is globals(), __package__)
    print(getattr(__spec__, "name", None), type(__loader__).__name__, __builtins__ is __import__("builtins"))
    print(sorted(k for k in globals() if k.startswith("__")), __doc__)
    print(sorted(set(os.environ) - {"OPTPASS_RUN_ID"}), signal.pthread_sigmask(signal.SIG_BLOCK, []), sys.flags)
    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdin.read())
    print([m for m in ("torch", "pydantic", "numpy") if m in sys.modules])
    print("to stderr", file=sys.stderr)
    sys.exit(7)
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_program_sees_what_it_would_see_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], module: bool
) -> None:
    path = script(tmp_path, SEES, "pk/prog.py")
    (tmp_path / "pk" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    command = "pk.prog" if module else os.path.relpath(path, tmp_path)
    alone = direct([*(["-m"] if module else []), command, "--a", "-h", "--", "x y"], tmp_path)
    with (tmp_path / "empty").open("w+") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        before = os.dup(0)
        os.dup2(nothing.fileno(), 0)
        try:
            ended = run(Job(command, module, ("--a", "-h", "--", "x y")))
        finally:
            os.dup2(before, 0)
            os.close(before)
    captured = capfd.readouterr()
    assert alone.returncode == ended.code == 7 and alone.stderr == captured.err == "to stderr\n"
    assert captured.out.splitlines() == alone.stdout.splitlines()
    assert ended.audit is None and not ended.compiled


SPAWNS = """
import multiprocessing as mp
def f():
    print(__name__, flush=True)
if __name__ == "__main__":
    process = mp.get_context("spawn").Process(target=f)
    process.start()
    process.join()
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise ValueError('no luck')", 1),
        ("def f():\n    raise SystemExit('a word')\nf()", 1),
        ("import sys; sys.exit(None)", 0),
        ("import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__, a[2].tb_lineno); 1 / 0", 1),
        ("class Mute(Exception):\n    def __str__(self): 1 / 0\nraise Mute", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(9)", 9),
        ("import atexit; atexit.register(print, 'bye')\ntry:\n    import missing_x\nfinally:\n    print('f')", 1),
        (SPAWNS, 0),
        ("import os\nif os.fork() == 0: raise SystemExit(0)\nos.wait(); print('parent')", 0),
    ],
    ids=["raises", "exit-text", "exit-none", "excepthook", "mute", "interrupt", "killed", "os-exit", "import", "spawn",
         "fork"],
)  # fmt: skip
def test_it_ends_as_it_would_without_us(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    path = script(tmp_path, text)
    alone = direct([path], tmp_path)
    ended = run(Job(path))
    captured = capfd.readouterr()
    assert (alone.returncode, ended.code) == (code, code)
    assert captured.out == alone.stdout and captured.err == alone.stderr


def test_what_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    cases = {
        str(tmp_path / "none.py"): "no such file",
        str(tmp_path): "is a folder",
        script(tmp_path, "x = = 3"): "not Python: invalid syntax at line 1",
        script(tmp_path, "\x00\x01", "binary"): "not Python",
        script(tmp_path, "return 3", "r.py"): "not Python: 'return' outside function at line 1",
    }
    for command, expected in cases.items():
        with pytest.raises(AuditError, match=expected) as caught:
            check(Job(command))
        assert "\n" not in str(caught.value)
    check(Job(script(tmp_path, "# -*- coding: latin-1 -*-\nx = '\\d'", "ok")))
    for name, expected in (
        ("no_such.module", "No module named 'no_such'"),
        ("xml.no", "no such module"),
        ("xml.etree", "is a package without __main__"),
    ):
        with pytest.raises(AuditError, match=f"-m {name}: {expected}"):
            run(Job(name, module=True))


def the_break(ended: Ended) -> None:
    """Whatever came later, the break that was met before is told."""
    assert ended.audit is not None
    assert [(b.function, b.code) for b in ended.audit.breaks] == [("bad", "torch._dynamo.graph_break()")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "partial"),
    [
        ("def f():\n    raise ValueError('no luck')\nf()", 1, "raised ValueError: no luck at .*prog.py:9"),
        ("raise ValueError('no luck ' * 1000)", 1, r"raised ValueError: [no luck]{200,290} \.\.\. at .*prog.py:8"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "killed by SIGKILL"),
        ("os._exit(5)", 5, r"without Python's exit \(os._exit\), code 5"),
    ],
    ids=["raises", "raises-at-length", "killed", "os-exit"],
)
def test_records_survive_how_it_ends(tmp_path: Path, end: str, code: int, partial: str) -> None:
    ended = run(Job(script(tmp_path, TORCH + end)))
    assert ended.code == code == (ended.audit and ended.audit.exit_code)
    the_break(ended)
    assert ended.audit is not None and re.search(partial, ended.audit.partial or "")


RAISES = """
import torch
def f(table, ids):
    h = torch.embedding(table, ids)
    torch._dynamo.graph_break()
    return h.sum(-1)
compiled = torch.compile(f, backend="eager")
compiled(torch.ones(4, 4), torch.tensor([1, 2]))
compiled(torch.ones(4, 4), torch.tensor([1, 7]))
"""


@pytest.mark.slow
def test_an_error_in_an_observed_graph_is_told_as_without_us(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, RAISES)
    alone = direct([path], tmp_path)
    ended = run(Job(path))
    assert ended.code == alone.returncode == 1 and "IndexError: index out of range" in alone.stderr
    assert capfd.readouterr().err == alone.stderr


TRAINS = """
import sys, torch
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
f = torch.compile(net, backend="eager")
if "infer" in sys.argv:
    del optimizer
done = 0
try:
    while done < 1000:
        for _ in range(3):  # gradients are accumulated
            loss = f(torch.randn(2, 4)).sum()
            if "infer" not in sys.argv:
                loss.backward()
        if "infer" not in sys.argv:
            optimizer.step()
        done += 1
finally:
    print("done", done)
"""


@pytest.mark.slow
def test_steps_end_it_cleanly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By optimizer steps, not by calls of the compiled function, where there is an optimizer; `finally` runs."""
    path = script(tmp_path, TRAINS)
    ended = run(Job(path, steps=4))
    assert ended.code == 0 and capfd.readouterr().out == "done 3\n"
    assert ended.audit is not None and ended.audit.partial is None
    assert "the run was ended after 4 optimizer steps (--steps 4)" in ended.audit.notes
    ended = run(Job(path, arguments=("infer",), steps=6))
    assert ended.code == 0 and capfd.readouterr().out == "done 1\n"
    assert ended.audit is not None and any("ended after 6 calls of " in note for note in ended.audit.notes)
