"""Processes that a program starts by multiprocessing are audited with it, as far as they begin as new interpreters."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from optpass.auditing import children
from optpass.auditing.runner import Job, run

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
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for n in (2, 3):
        process = context.Process(target=work, args=(queue, n))
        process.start()
        print(queue.get(timeout=100))
        process.join()
        print(process.exitcode)
"""


def test_what_spawned_processes_compile_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPTPASS_RUN_ID", raising=False)  # a test before this one may have begun a run here
    path = tmp_path / "prog.py"
    path.write_text(STARTS)
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
    assert "with what 2 processes compiled that the program started by multiprocessing" in audit.notes


def test_a_process_begins_as_it_would_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    """The call that is unpickled there hides whatever goes wrong, gives None, and leaves `sys.path` alone."""
    import sys

    before = list(sys.path)
    sent = pickle.dumps({"optpass": children._Begin(str(tmp_path), "no JSON")})
    assert pickle.loads(sent) == {"optpass": None}
    assert sys.path == before
