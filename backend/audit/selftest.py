"""How each thing was observed in this process, and what is less precise for want of a hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optpass.backend.compat import audit as dynamo


def how_observed(problems: Mapping[str, str], fallback: bool) -> tuple[dict[str, Any], list[str]]:
    """`Audit.hooks`, 'ok' for what is observed as it should be, and notes of events that could not be read.

    Args:
        problems: hook points that could not be installed, by what they observe, with what is lost.
        fallback: breaks are read from the trace log.
    """
    hooks: dict[str, Any] = {}
    notes: list[str] = []
    for point in dynamo.AUDIT_POINTS:
        what = point.observes
        if what in problems:
            instead = "the structured trace log" if point is dynamo.LOG_GRAPH_BREAK and fallback else "not observed"
            hooks[what] = f"{instead}: {problems[what]}"
        else:
            hooks[what] = "ok"
        for text, count in point.failures.items():
            notes.append(f"{point.name}: {count} event(s) could not be read ({text})")
    return hooks, notes
