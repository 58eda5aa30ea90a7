"""Processes that the program starts by `multiprocessing`, each recording for itself beside the program's records.

Followed are those that begin as a new interpreter ("spawn", "forkserver"): what is to be done travels in the data that
`multiprocessing` prepares them with, so that neither the environment nor the command line is touched. Forked processes
and other programs are not. Standard library only until torch's compiler is loaded.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

from optpass.auditing.imports import AfterImport

_PREFIX = "process-"
_MODULE = "multiprocessing.spawn"
_KEY = "optpass"
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
    """Have processes that this one starts by `multiprocessing` record too, into files of their own.

    Args:
        folder: of the files.
        settings: as of `child.Recorder`.
    """
    told = json.dumps({name: settings[name] for name in ("target", "root", "steps")})

    def attach() -> None:
        spawn = sys.modules[_MODULE]
        original = spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            return dict(original(name)) | {_KEY: _Begin(str(folder), told)}

        get_preparation_data.__wrapped__ = original  # type: ignore[attr-defined]
        spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]

    if _MODULE in sys.modules:
        attach()
    else:
        sys.meta_path.insert(0, AfterImport({_MODULE: attach}))


def begin(folder: str, settings: str) -> None:
    """In a new process: record from when the compiler loads, and follow its own processes."""
    from optpass.auditing.child import Outcome, Recorder
    from optpass.auditing.deferred import WhenCompilerLoads

    told = json.loads(settings)
    name = f"{_PREFIX}{os.getpid()}"
    path = Path(folder, f"{name}.json")
    recorder = Recorder(path, Outcome(outcome_of(path)), told)
    atexit.register(_finish, recorder)
    follow(Path(folder), told)
    WhenCompilerLoads(recorder.begin).install()


def _finish(recorder: Any) -> None:
    try:
        recorder.finish()
    except Exception:  # noqa: BLE001  # e.g. the audit has ended before: what was saved is all that can be kept
        return


def outcome_of(path: Path) -> Path:
    """Where the process with these records tells how it ended."""
    return path.with_suffix(".outcome")


def records(folder: Path) -> list[Path]:
    """Files that the program's processes have left."""
    return sorted(folder.glob(f"{_PREFIX}*.json"))
