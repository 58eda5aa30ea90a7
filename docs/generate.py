"""The parts of README.md and docs/*.md that are made from the code, so that they cannot differ from it.

    python docs/generate.py           # write them
    python docs/generate.py --check   # exit 1 and name the files that are out of date

A part stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`; NAME is a function of `generated_parts`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from generated_parts import PARTS

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python docs/generate.py"
_PART = re.compile(
    r"(?P<open><!-- generated: (?P<name>[a-z_]+) -->\n)(?P<body>.*?)(?P<close><!-- end: (?P=name) -->)", re.DOTALL
)
_MARK = re.compile(r"<!-- (?:generated|end): ([a-z_]+) -->")


def documents(root: Path) -> list[Path]:
    """The files that may hold generated parts."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def filled(text: str, where: str) -> str:
    """The text of a file with every part made anew.

    Raises:
        SystemExit: a marker that names no part, or that has no other end.
    """
    for name in _MARK.findall(text):
        if name not in PARTS:
            raise SystemExit(f"{where}: no part is called {name!r}; valid: {', '.join(PARTS)}")
    whole = [match["name"] for match in _PART.finditer(text)]
    if sorted(_MARK.findall(text)) != sorted(whole * 2):
        raise SystemExit(f"{where}: a part needs '<!-- generated: NAME -->' and, later, '<!-- end: NAME -->'")
    return _PART.sub(lambda match: match["open"] + PARTS[match["name"]]() + match["close"], text)


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write the generated parts, or with `--check` name the files that differ; 0 where all is up to date."""
    stale = []
    for path in documents(root):
        old = path.read_text(encoding="utf-8")
        new = filled(old, path.name)
        if new == old:
            continue
        stale.append(path.relative_to(root).as_posix())
        if "--check" not in arguments:
            path.write_text(new, encoding="utf-8")
    for name in stale:
        outcome = f"is out of date; run: {COMMAND}" if "--check" in arguments else "written"
        print(f"{name}: {outcome}", file=sys.stderr if "--check" in arguments else sys.stdout)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
