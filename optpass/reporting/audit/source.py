"""Source lines of the records: paths from the project's root, the text of a line, code frames. No rendering here."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from optpass.reporting.audit.model import Audit, Break, Recompile, SilentEager

#: What marks the top folder of a project, in the nearest folder that holds any of them.
ROOT_MARKS = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg")
_PACKAGES = ("site-packages", "dist-packages")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+/(.+)$")
_CONTEXT = 1  # lines shown before the line itself
_WIDTH = 160  # characters of a line that are shown


@dataclass(frozen=True)
class Frame:
    """Some lines of source, the last of them the one meant.

    Attributes:
        lines: (number, text), blanks that all of them begin with cut off.
        start: characters before the caret in the last line; None where the column is not known.
        width: length of the underline.
    """

    lines: tuple[tuple[int, str], ...]
    start: int | None
    width: int

    def text(self) -> str:
        """Numbered lines, a caret line under the last."""
        digits = len(str(self.lines[-1][0]))
        rows = [f"{number:>{digits}} | {text}".rstrip() for number, text in self.lines]
        if self.start is not None:
            rows.append(f"{'':>{digits}} | {'':{self.start}}{'^' * self.width}")
        return "\n".join(rows)


def project_root(start: Path) -> Path:
    """The nearest folder from `start` upwards that looks like a project's top; `start` itself where none does.

    The home folder and the file system's root are never taken, since version control of dotfiles marks the former.
    """
    folder = Path(os.path.realpath(start))
    refused = {Path.home(), Path(folder.anchor)}
    for candidate in (folder, *folder.parents):
        if candidate not in refused and any((candidate / mark).exists() for mark in ROOT_MARKS):
            return candidate
    return folder


def relative(file: str, root: str) -> str:
    """The path as a reader and a baseline know it: from `root`, site-packages or Python's library; else as it is."""
    if not file or file.startswith("<"):
        return file  # a notebook cell, an exec'd string
    path = PurePath(file)
    for base in filter(None, (root, os.path.realpath(root) if root else "")):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    for name in _PACKAGES:
        if name in path.parts:
            return PurePath(*path.parts[path.parts.index(name) + 1 :]).as_posix()
    # Where Python is installed differs from machine to machine, and a baseline is made on one of them.
    standard = _STANDARD.search(path.as_posix())
    return standard[1] if standard is not None else path.as_posix()


def place(file: str | None, line: int | None, root: str = "", column: int | None = None) -> str:
    """`train.py:12:5`, as much of it as is known."""
    parts = [relative(file or "", root), *(str(number) for number in (line, column) if number is not None)]
    return ":".join(parts) if file else ""


def line_text(file: str, line: int | None) -> str:
    """The source line, stripped; empty where it cannot be read. Knows notebook cells too."""
    return linecache.getline(file, line).strip() if file and line else ""


def annotate(audit: Audit, root: Path | str) -> Audit:
    """Fill what the views and the baseline need and the collectors do not write: `root` and each record's `code`."""
    linecache.checkcache()
    audit.root = audit.root or str(root)
    records: list[Break | Recompile | SilentEager] = [*audit.breaks, *audit.recompiles, *audit.silent_eager]
    for record in records:
        record.code = record.code or line_text(record.file, record.line)
    return audit


def frame(record: Break | Recompile | SilentEager, *, before: int = _CONTEXT) -> Frame | None:
    """The code frame of a record, read from its file while that still holds the line; else from what was kept.

    Args:
        before: lines of context.
    """
    if record.line is None:
        return None
    current = linecache.getline(record.file, record.line) if record.file else ""
    if not current.strip() or (record.code and current.strip() != record.code):
        return Frame(((record.line, _clipped(record.code)),), None, 0) if record.code else None
    numbers = range(max(record.line - before, 1), record.line + 1)
    lines = [(n, linecache.getline(record.file, n).rstrip().expandtabs(1)) for n in numbers]
    lines = lines[next(i for i, (_, text) in enumerate(lines) if text.strip()) :]
    indent = min(len(text) - len(text.lstrip()) for _, text in lines if text.strip())
    start, width = _underline(record, lines[-1][1], indent)
    return Frame(tuple((n, _clipped(text[indent:])) for n, text in lines), start, width)


def _underline(record: Break | Recompile | SilentEager, line: str, indent: int) -> tuple[int | None, int]:
    """Where the caret line begins and how long it is, in the line without its common indentation."""
    column = record.column if isinstance(record, Break) else None
    if column is None or not isinstance(record, Break) or not indent < column <= min(len(line), _WIDTH + indent):
        return None, 0
    same_line = record.end_line in (None, record.line)
    end = record.end_column if same_line and record.end_column is not None else None
    stop = min(end - 1 if end is not None else (len(line) if not same_line else column), len(line), _WIDTH + indent)
    return column - 1 - indent, max(stop - (column - 1), 1)


def _clipped(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
