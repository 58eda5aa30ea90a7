"""`optpass env`."""

from __future__ import annotations


def env() -> None:
    """Placeholder until its author lands it."""
