"""The fenced blocks of the documents, with where they stand and the comment above them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) ?-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is where its text begins, `note` the comment right above it."""

    language: str
    text: str
    line: int
    note: str


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def documents() -> list[Path]:
    """Every Markdown file of the tree."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="session")
def blocks() -> Callable[..., list[Block]]:
    """The fenced blocks of a file, of one language or of all, in order."""

    def find(path: Path, language: str | None = None) -> list[Block]:
        text = path.read_text(encoding="utf-8")
        found = [
            Block(m["language"], m["text"], text.count("\n", 0, m.start("text")) + 1, (m["note"] or "").strip())
            for m in _FENCE.finditer(text)
        ]
        assert text.count("\n```") + text.startswith("```") == 2 * len(found), f"{path.name}: a fence has no other end"
        return [block for block in found if language in (None, block.language)]

    return find
