"""Reading the user's source files as Python reads them, and losing nothing of them."""

from __future__ import annotations

import tokenize
from dataclasses import dataclass
from pathlib import Path

from optpass.errors import AuditError


@dataclass(frozen=True)
class SourceFile:
    """A file as it was read: its text with its own line endings and byte order mark, and its encoding."""

    text: str
    encoding: str


def read(path: Path) -> SourceFile:
    """A source file, decoded as Python decodes it.

    Raises:
        AuditError: it cannot be read, or not decoded.
    """
    try:
        with path.open("rb") as stream:
            encoding, _ = tokenize.detect_encoding(stream.readline)
        data = path.read_bytes()
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding  # the mark stays in the text
        return SourceFile(data.decode(encoding), encoding)
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise AuditError(f"{path} cannot be decoded: {error}") from None
