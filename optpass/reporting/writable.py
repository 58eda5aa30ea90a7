"""Whether a file can be written, asked before the work that it is to hold. Imports nothing but the standard library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from optpass.errors import ConfigError

STDOUT = "-"


def check_targets(named: Mapping[str, str | None]) -> None:
    """Fail now rather than after a minute of work, where the files that flags name could not all be written.

    Args:
        named: path by flag, e.g. {"--json": "-", "--html": None}; None where the flag was not given.

    Raises:
        ConfigError: as `check_target`; two flags name one file; or '-' for a flag other than --json.
    """
    taken: dict[str, str] = {}
    for flag, path in named.items():
        if path == STDOUT and flag != "--json":
            raise ConfigError(f"{flag}: give a file; only --json writes to standard output")
        check_target(flag, path)
        if path is None or path == STDOUT or (Path(path).exists() and not Path(path).is_file()):
            continue  # what is no regular file (/dev/null, a pipe) takes several
        other = taken.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise ConfigError(f"{flag} {path}: {other} writes to that file too; give each its own")


def check_target(flag: str, path: str | None) -> None:
    """Fail now rather than after a minute of work, where the file that `flag` names could not be written.

    Args:
        flag: for the message, e.g. '--json'.
        path: None and '-' (standard output) are fine.

    Raises:
        ConfigError: naming the flag, the path, the cause and the remedy.
    """
    if path is None or path == STDOUT:
        return
    if not path:
        raise ConfigError(f"{flag}: no path given; name a file")
    check_file(Path(path), f"{flag} {path}")


def check_file(path: Path, what: str) -> None:
    """Raises ConfigError, beginning with `what`, unless a file can be written at `path`; leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{what}: is a folder; give a file name in it")
    check_folder(path.absolute().parent, what)


def check_folder(folder: Path, what: str) -> None:
    """Raises ConfigError, beginning with `what`, unless files can be made in `folder`; leaves nothing behind."""
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    if not nearest.is_dir():
        raise ConfigError(f"{what}: {nearest} is a file, not a folder; choose another place")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(f"{what}: cannot write in {nearest}: {error.strerror}; choose another place") from None
