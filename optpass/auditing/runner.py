"""Runs a program under audit in a child process, and reads what it left. Needs no torch.

Signals: where there is a terminal, the child shares our process group, and gets Ctrl-C from the terminal itself; what
others send to us is passed on. Without a terminal the child has a group of its own, and everything is passed on. Either
way it gets each signal once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optpass.auditing import children
from optpass.auditing.finish import finish
from optpass.errors import AuditError
from optpass.reporting.audit import files
from optpass.reporting.audit.merge import merge
from optpass.reporting.audit.model import Audit
from optpass.reporting.audit.source import project_root
from optpass.reporting.environment import environment, process_record

_CHILD = Path(__file__).with_name("child.py")
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGWINCH")
#: Characters of an exception's text that are told.
_LONGEST = 300
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        command: path of a script, or a module's name.
        module: run it as `python -m` does.
        arguments: the program's own.
        steps: end the run after so many; None: when it ends.
        stdout: file descriptor for the program's standard output; None: ours.
        root: project folder; None: found from the program's place.
        stderr: file descriptor for the program's standard error; None: ours.
        trial: control file of a run for comparison, see trial.py; None: this is none.
    """

    command: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    stdout: int | None = None
    root: Path | None = None
    stderr: int | None = None
    trial: Path | None = None

    @property
    def target(self) -> str:
        """As a user writes it: `train.py --lr 1`, `-m pkg.train`."""
        return " ".join([*(["-m"] if self.module else []), self.command, *self.arguments])


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        audit: what was recorded; None where the program never loaded torch's compiler.
        code: exit code as `subprocess` has it: negative for a signal.
        how: one line where it did not simply end.
        facts: what the child told of the end.
    """

    audit: Audit | None
    code: int
    how: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        """Whether anything was compiled, or should have been."""
        made = self.audit
        return made is not None and bool(made.functions or made.breaks or made.recompiles or made.silent_eager)


def check(job: Job) -> None:
    """Raises AuditError, in one line, where a script cannot be run as Python: missing, a folder, or not Python."""
    if job.module:
        return
    path = Path(job.command)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise AuditError(f"{job.command}: no such file; give a script, or -m and a module") from None
    except IsADirectoryError:
        raise AuditError(f"{job.command}: is a folder; give the script in it, or -m and a package") from None
    except OSError as error:
        raise AuditError(f"{job.command}: cannot be read: {error.strerror}") from None
    if path.suffix == ".pyc":
        return
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program itself shows them
            compile(data, job.command, "exec", dont_inherit=True)
    except SyntaxError as error:
        at = f" at line {error.lineno}" if error.lineno else ""
        raise AuditError(f"{job.command}: not Python: {error.msg}{at}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise AuditError(f"{job.command}: not Python: {error}") from None


def run(job: Job) -> Ended:
    """Run a program to its end and give what was recorded, whole or partial.

    Raises:
        AuditError: the script or the module cannot be run at all.
    """
    check(job)
    root = job.root or project_root(Path.cwd() if job.module else Path(job.command).absolute().parent)
    # Processes that outlive the program may still write there.
    with tempfile.TemporaryDirectory(prefix="optpass-audit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        settings = {
            "command": job.command, "module": job.module, "arguments": list(job.arguments), "steps": job.steps,
            "target": job.target, "root": str(root), "trial": None if job.trial is None else str(job.trial),
        }  # fmt: skip
        code, signals = _supervise(folder, settings, job)
        facts = _outcome(folder / "outcome.json")
        if facts.get("ended") == "not found":
            raise AuditError(str(facts.get("detail")))
        made = _together(_records(folder / "audit.json"), folder)
    how, partial = _told(facts, code, signals)
    if made is not None:
        made.exit_code = code
        made.partial = partial
        if facts.get("ended") == "steps":
            made.notes.append(f"the run was ended after {facts.get('detail')} (--steps {job.steps})")
        if "problem" in facts:
            made.notes.append(f"not all could be recorded: {facts['problem']}")
        if job.trial is None:
            finish(made, root)
    return Ended(made, code, how, facts)


def nothing_recorded(job: Job, ended: Ended) -> Audit:
    """The audit of a program that never loaded torch's compiler."""
    return Audit(
        target=job.target,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        partial=ended.how if ended.facts.get("ended") not in ("exit", "steps") else None,
        exit_code=ended.code,
        environment=environment(),
        processes=[process_record()],
        notes=["the program never loaded torch's compiler"],
    )


def _told(facts: dict[str, Any], code: int, signals: list[signal.Signals]) -> tuple[str, str | None]:
    """How the run ended in one line, and why its report is partial, if it is."""
    ended, detail = facts.get("ended"), facts.get("detail", "")
    if ended == "steps":
        return f"ended after {detail}", None
    ending = [s.name for s in signals if s in _ENDING]
    if ended == "exception":
        at = f" at {facts['line']}" if facts.get("line") else ""
        told = f"the program raised {textwrap.shorten(detail, _LONGEST, placeholder=' ...')}{at}"
        return told, told
    if ended == "interrupted" or ending:
        told = f"the program was interrupted ({', '.join(dict.fromkeys(ending)) or detail})"
        return told, told
    if code < 0:
        told = f"the program was killed by {_signal_name(-code)}; records are those of the last save"
        return told, told
    if ended is None:
        told = f"the program ended without Python's exit (os._exit), code {code}; records are those of the last save"
        return told, told
    return (f"exit code {code}" if code else ""), None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _outcome(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _records(path: Path) -> Audit | None:
    return files.read(path) if path.is_file() else None


def _together(made: Audit | None, folder: Path) -> Audit | None:
    """The program's records with those of processes that it started: one rank, unless it is what started the ranks."""
    parts = [] if made is None else [made]
    lost: list[str] = []
    for path in children.processes(folder):
        facts = _outcome(children.outcome_of(path))
        if "problem" in facts:
            lost.append(f"not all could be recorded of a process that the program started: {facts['problem']}")
        with suppress(AuditError):  # it compiled nothing, or was killed while it began
            part = files.read(path)
            if facts.get("ended") == "steps":
                part.notes.append(f"a process that the program started was ended after {facts.get('detail')}")
            parts.append(part)
    if not parts:
        return None
    own = made.processes[0] if made is not None and made.processes else process_record()
    for process in (process for part in parts for process in part.processes):
        if own.world_size > 1 or process.world_size == 1:  # else the program is a launcher of ranks
            process.rank = own.rank
    together = merge(parts)
    if len(parts) > (made is not None):
        number = len(parts) - (made is not None)
        which = "process" if number == 1 else "processes"
        together.notes.append(f"with what {number} {which} compiled that the program started")
    together.notes += dict.fromkeys(lost)
    return together


# ---- the child ------------------------------------------------------------------------------------------------------


def _supervise(folder: Path, settings: dict[str, Any], job: Job) -> tuple[int, list[signal.Signals]]:
    """Start the child, pass signals on until it ends; its exit code, and the signals that came."""
    control = folder / "control.json"
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), str(_CHILD), str(control)]  # type: ignore[attr-defined]
    own_group = not _has_terminal()
    with _held() as (held, mask):
        control.write_text(json.dumps(settings | {"mask": [int(s) for s in mask]}), encoding="utf-8")
        sys.stdout.flush()
        child = subprocess.Popen(command, stdout=job.stdout, stderr=job.stderr, process_group=0 if own_group else None)
        signals = _pass_on(child, held, own_group)
    return child.returncode, signals


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextmanager
def _held() -> Iterator[tuple[set[signal.Signals], set[int]]]:
    """Signals are held back, to be taken one by one; what comes last of all is dropped with them.

    Yields the signals and the mask from before, which the child sets again.
    """
    held = {getattr(signal, name) for name in _PASSED_ON} | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield held, {int(s) for s in before}
    finally:
        while signal.sigtimedwait(held, 0) is not None:
            pass  # meant for the program, which has ended
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(child: subprocess.Popen[bytes], held: set[signal.Signals], own_group: bool) -> list[signal.Signals]:
    """Wait for the child; signals from other processes go on to it, those of the terminal reached it already."""
    came: list[signal.Signals] = []
    while child.poll() is None:
        info = signal.sigwaitinfo(held)
        number = signal.Signals(info.si_signo)
        if number == signal.SIGCHLD:
            continue
        came.append(number)
        by_a_process = info.si_code <= 0
        if own_group or by_a_process:
            child.send_signal(number)
    return came


def die_by(number: int) -> None:
    """End this process by a signal, as the program ended; returns only where that does not end it."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's own core is the one of interest
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):  # SIGKILL has no handler that could be in the way
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
