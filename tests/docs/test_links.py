"""Links between the documents lead somewhere, and folders that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in _HEADING.findall(text)}


def test_links_lead_somewhere(documents: list[Path]) -> None:
    broken = []
    for path in documents:
        for link in set(_LINK.findall(path.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+://", link):
                continue
            place, _, anchor = link.partition("#")
            target = (path.parent / place).resolve() if place else path
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_every_document_is_reachable_from_the_readme(root: Path, documents: list[Path]) -> None:
    reached, waiting = set(), [root / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        links = _LINK.findall(path.read_text(encoding="utf-8"))
        waiting += [(path.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link]
    assert {path.name for path in documents} - {path.name for path in reached} == set()
