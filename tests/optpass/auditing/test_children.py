"""Processes that a program starts by multiprocessing, or forks, are audited with it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from optpass.auditing import children
from optpass.auditing.runner import Ended, Job, run
from optpass.reporting.audit.model import Audit

STARTS = """\
import multiprocessing, os, sys
import torch

class Kept:
    pass

def bad(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2

def work(queue, n):
    made = torch.compile(bad, backend="eager")(torch.ones(n)).sum().item()
    queue.put((made, sys.argv[1:], Kept.__module__, sorted(k for k in os.environ if "OPTPASS" in k)))

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    queue = context.Queue()
    for n in (2, 3):
        process = context.Process(target=work, args=(queue, n))
        process.start()
        print(queue.get(timeout=100))
        process.join()
        print(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_such_processes_compile_is_told(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPTPASS_RUN_ID", raising=False)  # a test before this one may have begun a run here
    path = tmp_path / "prog.py"
    path.write_text(STARTS.replace("METHOD", repr(method)))
    ended = run(Job(str(path), arguments=("--lr", "1")))
    told = capfd.readouterr()
    assert told.out.splitlines() == [
        "(8.0, ['--lr', '1'], '__mp_main__', [])", "0", "(12.0, ['--lr', '1'], '__mp_main__', [])", "0",
    ]  # fmt: skip
    assert not told.err and ended.code == 0
    audit = ended.audit
    assert audit is not None and audit.partial is None
    (brk,) = audit.breaks
    assert (brk.function, brk.occurrences, brk.line) == ("bad", 2, 9)
    assert len(audit.processes) == 2 and {process.rank for process in audit.processes} == {0}
    assert "with what 2 processes compiled that the program started" in audit.notes


def test_a_process_begins_as_it_would_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    """The call that is unpickled there hides whatever goes wrong, gives None, and leaves `sys.path` alone."""
    import sys

    before = list(sys.path)
    sent = pickle.dumps({"optpass": children._Begin(str(tmp_path), "no JSON")})
    assert pickle.loads(sent) == {"optpass": None}
    assert sys.path == before


FORKS = """\
import multiprocessing, os, signal, sys, threading, torch

def bad(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2

def worse(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()

def worst(x):
    x = x.exp()
    torch._dynamo.graph_break()
    return x.log()

def scaled(x, scale):
    return x * scale

def train(steps):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(steps):
        torch.compile(bad, backend="eager")(weight).sum().backward()
        optimizer.step()
    print("trained", steps, flush=True)

def forked(work, end=os._exit):
    pid = os.fork()
    if pid == 0:
        work()
        end(0)
    print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

def compiles(function, times=1):
    compiled = torch.compile(function, backend="eager")
    for _ in range(times):
        compiled(torch.ones(3))
"""


def forks(tmp_path: Path, text: str, steps: int | None = None) -> tuple[Ended, Audit]:
    path = tmp_path / "prog.py"
    path.write_text(FORKS + text)
    ended = run(Job(str(path), steps=steps))
    assert ended.audit is not None
    return ended, ended.audit


def breaks(audit: Audit) -> dict[str, int]:
    return {brk.function: brk.occurrences for brk in audit.breaks}


@pytest.mark.slow
def test_forked_before_the_compiler_is_there(tmp_path: Path) -> None:
    """Also by a forked process; the parent compiles something itself, later."""
    ended, audit = forks(tmp_path, "forked(lambda: forked(lambda: compiles(worse)))\ncompiles(bad)\n")
    assert ended.code == 0 and audit.partial is None and breaks(audit) == {"bad": 1, "worse": 1}
    assert "with what 1 process compiled that the program started" in audit.notes
    ended, audit = forks(tmp_path, "forked(lambda: compiles(worse), sys.exit)\n")
    assert ended.code == 0 and breaks(audit) == {"worse": 1}


@pytest.mark.slow
def test_forked_processes_add_what_they_compile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """However they end; and nothing of theirs gets into their parent's records, nor of those into theirs."""
    ended, audit = forks(
        tmp_path,
        """
compiles(bad)
function = torch.compile(scaled, backend="eager")
function(torch.ones(3), 2)
names = lambda: print([t.name for t in threading.enumerate()], flush=True)
names()
forked(names)  # nothing is compiled there: it is not told of
names()
forked(lambda: compiles(worse))
forked(lambda: (compiles(worse), torch._dynamo.reset(), compiles(bad)), sys.exit)
forked(lambda: function(torch.ones(3), 3))

def interrupted():
    compiles(worse)
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

forked(interrupted)
process = multiprocessing.get_context("fork").Process(target=compiles, args=(worst, 9))
process.start()
process.join()
""",
    )
    told = capfd.readouterr()
    # From Python 3.12 on, a process with threads is warned of when it forks: none of ours may be there then.
    assert told.out.splitlines() == [
        "['MainThread', 'optpass-audit']", "['MainThread']", "code 0", "['MainThread']", "code 0", "code 0", "code 0",
        "code -2",
    ]  # fmt: skip
    assert told.err.rstrip().endswith("KeyboardInterrupt")
    assert ended.code == 0 and audit.partial is None
    assert breaks(audit) == {"bad": 2, "worse": 3, "worst": 1}
    (recompile,) = audit.recompiles
    assert (recompile.cause, recompile.source, recompile.before, recompile.after) == ("int", "scale", "2", "3")
    assert "with what 5 processes compiled that the program started" in audit.notes
    # Exit handlers do not run in processes of multiprocessing, on Python 3.11: what came behind the last compile.
    (worst,) = (f for f in audit.functions if f.function == "worst")
    assert worst.calls == 9 and worst.t_steady_s is not None


@pytest.mark.slow
def test_workers_of_a_pool_and_of_a_data_loader(tmp_path: Path) -> None:
    _, audit = forks(
        tmp_path,
        """
class Data(torch.utils.data.Dataset):
    made = torch.compile(bad, backend="eager")
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return self.made.__func__(torch.ones(3)) if i % 2 else torch.compile(worse, backend="eager")(torch.ones(3))

def in_pool(n):
    compiles(bad)
    return n

for batch in torch.utils.data.DataLoader(Data(), num_workers=2):
    pass
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(in_pool, range(4)))
    pool.close()
    pool.join()
""",
    )
    assert audit.partial is None and set(breaks(audit)) == {"bad", "worse"}
    assert len(audit.processes) >= 3


@pytest.mark.slow
def test_steps_end_each_process_by_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended, audit = forks(
        tmp_path,
        """
process = multiprocessing.get_context("fork").Process(target=train, args=(100,))
train(2)
process.start()
process.join()
print("code", process.exitcode)
train(1)
""",
        steps=3,
    )
    assert capfd.readouterr().out.splitlines() == ["trained 2", "code 0"]
    assert ended.code == 0 and breaks(audit) == {"bad": 1}  # the forked process has what was compiled
    assert "a process that the program started was ended after 3 optimizer steps" in audit.notes
    assert "the run was ended after 3 optimizer steps (--steps 3)" in audit.notes
