"""Whether a file can be written, asked before the work that it is to hold. Imports nothing but the standard library."""

from __future__ import annotations

import tempfile
from pathlib import Path

from optpass.errors import ConfigError

STDOUT = "-"


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
