"""Ranks of a run under torchrun: each adds its records to one file; the last one of a machine shows the whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from optpass.reporting.audit import files
from optpass.reporting.audit.model import Audit
from optpass.reporting.environment import run_id


def together(audit: Audit, path: str | None, environ: Mapping[str, str] | None = None) -> tuple[Audit, bool]:
    """This rank's records merged with those that other ranks have written, and whether this machine's are complete.

    Ranks find each other by what torchrun tells them, or by `OPTPASS_RUN_ID`; under other launchers each is alone.

    Args:
        path: the JSON file that all ranks were given; None: one in the temporary folder, removed when complete.

    Raises:
        AuditError: the file cannot be written.
    """
    environ = os.environ if environ is None else environ
    here = _integer(environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE"))
    known = environ.get("OPTPASS_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID")
    if here <= 1 or not known or "RANK" not in environ:
        return audit, True
    audit.run_id = run_id()
    shared = Path(path) if path is not None else _temporary(audit.run_id)
    merged = files.write_merged(audit, shared)
    host = audit.processes[0].host
    complete = len({process.rank for process in merged.processes if process.host == host}) >= here
    if complete and path is None:
        with contextlib.suppress(OSError):
            shared.unlink()
    return merged, complete


def _temporary(run: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in run)
    return Path(tempfile.gettempdir()) / f"optpass-audit-{os.getuid()}-{name}.json"


def _integer(text: str | None) -> int:
    try:
        return int(text or 1)
    except ValueError:
        return 1
