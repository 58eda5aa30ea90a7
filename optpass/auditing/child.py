"""Runs the user's program under audit, in the process that the runner started for it; there this file is run by path.

The program finds what it would find without us: its argv, `__main__`, `sys.path[0]`, environment, streams and signals,
and a torch that it imports itself. Standard library only until it has. Records are saved again and again while it runs,
so that they are there however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpass.auditing.program import Program

#: Exit code where the module to run does not exist; the runner tells it apart by the outcome file.
NOT_FOUND = 2
_PR_SET_PDEATHSIG = 1


class Outcome:
    """How the program ended, as a small JSON file beside the records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.facts: dict[str, Any] = {}

    def write(self, **facts: Any) -> None:
        """Add facts; in a forked child of the program's nothing happens, nor where it outlives the folder."""
        if os.getpid() != self.pid:
            return
        self.facts |= facts
        part = self.path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(self.facts), encoding="utf-8")
            part.replace(self.path)


class Recorder:
    """Starts the audit when the compiler loads, saves it while the program runs, and once more at its end.

    A process that the program forks records what it compiles itself, into files of its own.

    Args:
        path: of the records.
        settings: `target`, `root`, `steps`, and `records`: whether processes other than the first record.
        trial: what a run for comparison keeps besides; None: this is none.
        first: whether this is the program's first process, which is told of in any case.
    """

    def __init__(
        self, path: Path, outcome: Outcome, settings: dict[str, Any], trial: Any = None, *, first: bool = True
    ) -> None:
        self.path, self.outcome, self.settings = path, outcome, settings
        self.session: Any = None
        self._first = first
        self._trial = trial
        self._saver: Any = None
        self._counter: Any = None
        self._follows = False

    def begin(self) -> None:
        """The compiler is loaded: record from here on. Where that fails, the program runs all the same."""
        try:
            if os.getpid() != self.outcome.pid:
                self._renew()  # it was loaded in a forked process, and not before
            self._begin()
            self._follow()
        except Exception as error:  # noqa: BLE001  # told by the runner; the program must not notice
            self.outcome.write(problem=f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _begin(self) -> None:
        from optpass.auditing.saving import Saver
        from optpass.auditing.session import AuditSession

        if self._first or self.settings["records"]:
            self.session = AuditSession(target=self.settings["target"], root=self.settings["root"])
            self.session.start()
            self._saver = Saver(self.session, self.path, always=self._first)
            self._saver.start()
        if self._trial is not None:
            self._trial.begin()
        if self.settings["steps"] is not None:
            from optpass.auditing.steps import StepCounter

            self._counter = StepCounter(self.settings["steps"], self._reached, self._give_up)
            self._counter.start()

    # ---- forked processes ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Have processes that are forked from here on record too. Last of all: hooks forget who watched them first."""
        if not self._follows and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._pause, after_in_child=self._forked)
            self._follows = True

    def _pause(self) -> None:
        """The process is about to be forked: no thread of ours may be at work, as Python 3.12 warns of threads."""
        if self._saver is not None:
            with contextlib.suppress(Exception):
                self._saver.pause()

    def _forked(self) -> None:
        """In a forked process: what was recorded is its parent's; what it compiles itself is its own."""
        try:
            self._renew()
            self._begin()
        except Exception as error:  # noqa: BLE001  # as in `begin`
            self.outcome.write(problem=f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _renew(self) -> None:
        from optpass.auditing import children

        if self._counter is not None:
            self._counter.stop()
        self._first = False
        self.path = children.new_path(self.path.parent)
        self.outcome = Outcome(children.outcome_of(self.path))
        self.session = self._saver = self._counter = self._trial = None
        children.at_process_end(self)

    def _reached(self, told: str) -> None:
        self.outcome.write(ended="steps", detail=told)

    def _give_up(self) -> None:
        self.finish()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def finish(self) -> None:
        """Save what there is, for the last time. In a forked child that does not record nothing happens."""
        if os.getpid() != self.outcome.pid or self._saver is None:
            return
        if self._counter is not None:
            self._counter.stop()
        self._saver.stop()
        self.session.stop()
        self._saver.save()
        self._saver = None
        if self._trial is not None:
            self._trial.finish()


def run(program: Program, outcome: Outcome) -> None:
    """Run the program; exceptions are told as Python tells them, without frames of ours. Gives way to `SystemExit`."""
    try:
        code = program.prepare()
    except ImportError as error:
        if program.module and (error.name or "").partition(".")[0] == program.command.partition(".")[0]:
            outcome.write(ended="not found", detail=f"-m {program.command}: {error}")
            raise SystemExit(NOT_FOUND) from None
        _report(error, outcome)
    except Exception as error:  # noqa: BLE001  # a module's own package may raise anything; it is told and exits with 1
        _report(error, outcome)
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit:
        if outcome.facts.get("ended") != "steps":
            outcome.write(ended="exit")
        raise
    except KeyboardInterrupt as error:
        outcome.write(ended="interrupted", detail="KeyboardInterrupt")
        _show(error)
        _interrupted_at_exit()
        raise SystemExit(1) from None
    except BaseException as error:  # noqa: BLE001  # told as Python tells an uncaught exception, exit code 1
        _report(error, outcome)
    outcome.write(ended="exit")


def _report(error: BaseException, outcome: Outcome) -> None:
    # Not by str(): a __str__ that raises is told as Python tells it.
    text = " ".join(str(traceback.TracebackException(type(error), error, None)).split())
    name = type(error).__name__
    outcome.write(ended="exception", detail=f"{name}: {text}" if text else name, line=_line(error))
    _show(error)
    raise SystemExit(1)


def _line(error: BaseException) -> str:
    frames = traceback.extract_tb(_own(error))
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _own(error: BaseException) -> types.TracebackType | None:
    """The traceback without our frames at its top, without the import system's, and without those around a graph."""
    at = error.__traceback__
    ours = (__file__, str(Path(__file__).with_name("program.py")), "<frozen importlib._bootstrap>")
    while at is not None and at.tb_frame.f_code.co_filename in ours:
        at = at.tb_next
    observe = getattr(sys.modules.get("optpass.backend.audit.observe"), "__file__", None)
    before, entry = at, at.tb_next if at is not None else None
    while before is not None and entry is not None:
        behind = entry.tb_next
        if behind is not None and behind.tb_frame.f_code.co_filename == observe:
            entry = before.tb_next = behind.tb_next  # with the frame of torch's that switches Dynamo off for ours
        else:
            before, entry = entry, behind
    return at


def _show(error: BaseException) -> None:
    """What Python does with an uncaught exception: its traceback by `sys.excepthook`."""
    at = _own(error)
    shown = error.with_traceback(at)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), shown, at
    try:
        sys.excepthook(type(error), shown, at)
    except Exception:  # noqa: BLE001  # the program's own hook failed; Python then shows both errors
        traceback.print_exc()
        sys.__excepthook__(type(error), shown, at)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def _interrupted_at_exit() -> None:
    """End by SIGINT itself, as Python does, so that shells and parents see an interrupted program; once all is done."""

    def end() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGINT)

    _LAST.append((os.getpid(), end))


#: What is done at the very end of a process, after every exit handler of the program's.
_LAST: list[tuple[int, Callable[[], None]]] = []


def at_exit(recorder: Recorder) -> None:
    """Registered first, so run last; in forked processes too."""
    try:
        recorder.finish()
    except Exception as error:  # noqa: BLE001  # the program has ended; what was saved before is still there
        recorder.outcome.write(problem=f"{type(error).__name__}: {' '.join(str(error).split())}")
    for pid, action in _LAST:
        if pid == os.getpid():
            action()


def _die_with_parent() -> None:
    """Where the runner is killed, the program must not go on unseen. Linux only."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main() -> None:
    """Read what to do from the file that the runner names, then be the program."""
    control = Path(sys.argv[1])
    settings = json.loads(control.read_text(encoding="utf-8"))
    signal.pthread_sigmask(signal.SIG_SETMASK, settings["mask"])
    _die_with_parent()
    outcome = Outcome(control.with_name("outcome.json"))
    trial = None
    if settings["trial"] is not None:
        from optpass.auditing.trial import Trial

        trial = Trial(Path(settings["trial"]))
        trial.install()
    settings["records"] = trial is None
    recorder = Recorder(control.with_name("audit.json"), outcome, settings, trial)
    atexit.register(at_exit, recorder)
    from optpass.auditing.deferred import WhenCompilerLoads
    from optpass.auditing.program import Program

    WhenCompilerLoads(recorder.begin).install()
    if settings["records"] or settings["steps"] is not None:
        from optpass.auditing.children import follow

        follow(control.parent, settings)
    run(Program(settings["command"], settings["module"], settings["arguments"]), outcome)


if __name__ == "__main__":
    # Run by path, this file's folder stands first in sys.path, where Python puts a script's; it is not the program's.
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
