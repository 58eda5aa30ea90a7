"""All programs of the suite, in the order of their modules."""

from __future__ import annotations

import importlib
from pathlib import Path

from attention_near_misses.program import Program

#: Modules of this folder that hold no programs.
MACHINERY = frozenset({"careless", "check", "loading", "program"})


def programs() -> list[Program]:
    """Every program; their names are unique."""
    topics = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in MACHINERY)
    found = [p for topic in topics for p in importlib.import_module(f"attention_near_misses.{topic}").suite]
    names = [p.name for p in found]
    repeated = {n for n in names if names.count(n) > 1}
    assert not repeated, f"names used twice: {sorted(repeated)}"
    return found
