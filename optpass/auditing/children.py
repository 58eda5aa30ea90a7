"""Processes that the program starts, each recording for itself beside the program's records.

Followed are those that `multiprocessing` begins as a new interpreter ("spawn", "forkserver"): what is to be done
travels in the data that it prepares them with, so that neither the environment nor the command line is touched. Forked
processes are followed by the recorder itself, see `child.Recorder`, Python programs in `joined`. Standard library only
until torch's compiler is loaded.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from optpass.auditing import joined
from optpass.auditing.imports import AfterImport

_PREFIX = "process-"
_MODULE, _PROGRAMS = "multiprocessing.spawn", "subprocess"
_KEY = "optpass"
#: Behind everything that the program has asked for, and behind what becomes of its own processes.
_LAST = -(1 << 30)
#: Runs in the new process before the program's own `sys.path` is set: what is imported is ours, as in the first one.
#: Whatever goes wrong, the process is the program's and goes on.
_BEGIN = """
import sys
kept = sys.path[:]
sys.path[:] = [entry for entry in kept if entry]
try:
    from optpass.auditing import children
    children.begin({folder!r}, {settings!r})
except Exception:
    pass
finally:
    sys.path[:] = kept
"""


class _Begin:
    """Pickled as a call: it acts where it is unpickled, and is None there."""

    def __init__(self, folder: str, settings: str) -> None:
        self.text = _BEGIN.format(folder=folder, settings=settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.text, {})


def follow(folder: Path, settings: dict[str, Any]) -> None:
    """Have processes that this one starts record too, into files of their own.

    Args:
        folder: of the files.
        settings: as of `child.Recorder`.
    """
    told = json.dumps({name: settings[name] for name in ("target", "root", "steps", "records")})

    def attach() -> None:
        spawn = sys.modules[_MODULE]
        original = spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            return dict(original(name)) | {_KEY: _Begin(str(folder), told)}

        get_preparation_data.__wrapped__ = original  # type: ignore[attr-defined]
        spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]

    for name, action in ((_MODULE, attach), (_PROGRAMS, partial(joined.follow, folder, told))):
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, AfterImport({name: action}))


def begin(folder: str, settings: str) -> None:
    """In a new process: record from when the compiler loads, and follow its own processes."""
    from optpass.auditing.child import Outcome, Recorder
    from optpass.auditing.deferred import WhenCompilerLoads

    told = json.loads(settings)
    path = new_path(Path(folder))
    recorder = Recorder(path, Outcome(outcome_of(path)), told, first=False)
    atexit.register(_finish, recorder)
    at_process_end(recorder)
    follow(Path(folder), told)
    WhenCompilerLoads(recorder.begin).install()


def at_process_end(recorder: Any) -> None:
    """Have `recorder` finish as this process ends, if `multiprocessing` made it: exit handlers may not run there."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # what is to be finalized by now is thrown away as the process begins, and this asked for then
        util.register_after_fork(recorder, _finalize)


def _finalize(recorder: Any) -> None:
    sys.modules["multiprocessing.util"].Finalize(None, _finish, (recorder,), exitpriority=_LAST)


def _finish(recorder: Any) -> None:
    try:
        recorder.finish()
    except Exception:  # noqa: BLE001  # e.g. the audit has ended before: what was saved is all that can be kept
        return


def new_path(folder: Path) -> Path:
    """Of this process's records; process ids are used again."""
    return folder / f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}.json"


def outcome_of(path: Path) -> Path:
    """Where the process with these records tells how it ended."""
    return path.with_suffix(".outcome")


def processes(folder: Path) -> list[Path]:
    """Where the records are of each process that has left something, if only word of its end."""
    return sorted({path.with_suffix(".json") for path in folder.glob(f"{_PREFIX}*") if path.suffix != ".part"})
