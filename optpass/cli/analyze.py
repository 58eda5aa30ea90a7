"""`optpass analyze`."""

from __future__ import annotations


def analyze() -> None:
    """Placeholder until its author lands it."""
