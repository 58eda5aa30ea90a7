"""What to write instead, per kind of break. Nothing here looks at the user's files."""

from __future__ import annotations

from collections.abc import Sequence


def advise(gb_type: str, gb_id: str | None, context: str, explanation: str, hints: Sequence[str]) -> str:
    """The advice, '' where nothing concrete is known."""
    return ""
