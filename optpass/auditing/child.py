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
        """Add facts; in a forked child of the program's nothing happens."""
        if os.getpid() != self.pid:
            return
        self.facts |= facts
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.facts), encoding="utf-8")
        part.replace(self.path)


class Recorder:
    """Starts the audit when the compiler loads, saves it while the program runs, and once more at its end.

    Args:
        path: of the records.
        settings: `target`, `root`, `steps`.
        trial: what a run for comparison keeps besides; None: this is none.
    """

    def __init__(self, path: Path, outcome: Outcome, settings: dict[str, Any], trial: Any = None) -> None:
        self.path, self.outcome, self.settings = path, outcome, settings
        self.session: Any = None
        self._trial = trial
        self._saver: Any = None
        self._counter: Any = None

    def begin(self) -> None:
        """The compiler is loaded: record from here on. Where that fails, the program runs all the same."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001  # told by the runner; the program must not notice
            self.outcome.write(problem=f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _begin(self) -> None:
        from optpass.auditing.saving import Saver
        from optpass.auditing.session import AuditSession

        self.session = AuditSession(target=self.settings["target"], root=self.settings["root"])
        self.session.start()
        self._saver = Saver(self.session, self.path)
        self._saver.start()
        if self._trial is not None:
            self._trial.begin()
        if self.settings["steps"] is not None:
            from optpass.auditing.steps import StepCounter

            self._counter = StepCounter(self.settings["steps"], self._reached, self._give_up)
            self._counter.start()

    def _reached(self, told: str) -> None:
        self.outcome.write(ended="steps", detail=told)

    def _give_up(self) -> None:
        self.finish()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def finish(self) -> None:
        """Save what there is, for the last time. In a forked child of the program's nothing happens."""
        if os.getpid() != self.outcome.pid or self._saver is None:
            return
        if self._counter is not None:
            self._counter.stop()
        self._saver.stop()
        self.session.stop()
        self._saver.save()
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
    text = " ".join(str(error).split())
    name = type(error).__name__
    outcome.write(ended="exception", detail=f"{name}: {text}" if text else name, line=_line(error))
    _show(error)
    raise SystemExit(1)


def _line(error: BaseException) -> str:
    frames = traceback.extract_tb(_own(error))
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _own(error: BaseException) -> types.TracebackType | None:
    """The traceback without our frames at its top, and without the import system's."""
    at = error.__traceback__
    ours = (__file__, str(Path(__file__).with_name("program.py")), "<frozen importlib._bootstrap>")
    while at is not None and at.tb_frame.f_code.co_filename in ours:
        at = at.tb_next
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

    _LAST.append(end)


#: What is done at the very end of the process, after every exit handler of the program's.
_LAST: list[Callable[[], None]] = []


def _at_exit(recorder: Recorder, pid: int) -> None:
    """Registered first, so run last."""
    if os.getpid() != pid:
        return
    try:
        recorder.finish()
    except Exception as error:  # noqa: BLE001  # the program has ended; what was saved before is still there
        recorder.outcome.write(problem=f"{type(error).__name__}: {' '.join(str(error).split())}")
    for action in _LAST:
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
    recorder = Recorder(control.with_name("audit.json"), outcome, settings, trial)
    atexit.register(_at_exit, recorder, os.getpid())
    from optpass.auditing.deferred import WhenCompilerLoads
    from optpass.auditing.program import Program

    WhenCompilerLoads(recorder.begin).install()
    if trial is None:
        from optpass.auditing.children import follow

        follow(control.parent, settings)
    run(Program(settings["command"], settings["module"], settings["arguments"]), outcome)


if __name__ == "__main__":
    # Run by path, this file's folder stands first in sys.path, where Python puts a script's; it is not the program's.
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
