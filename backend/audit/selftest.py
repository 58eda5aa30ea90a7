"""How each thing was observed in this process, and what is less precise for want of a hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optpass.backend.compat import audit as dynamo

Failures = dict[tuple[str, str], int]


def failures() -> Failures:
    """What watchers of this process raised so far, and how often, by (hook point, text)."""
    return {(p.name, text): count for p in dynamo.AUDIT_POINTS for text, count in p.failures.items()}


def how_observed(problems: Mapping[str, str], fallback: bool, before: Failures) -> tuple[dict[str, Any], list[str]]:
    """`Audit.hooks`, 'ok' for what is observed as it should be, and notes of events that could not be read.

    Args:
        problems: hook points that could not be installed, by what they observe, with what is lost.
        fallback: breaks are read from the trace log.
        before: `failures()` when the recording began.
    """
    hooks: dict[str, Any] = {}
    for point in dynamo.AUDIT_POINTS:
        what = point.observes
        if what in problems:
            instead = "the structured trace log" if point is dynamo.LOG_GRAPH_BREAK and fallback else "not observed"
            hooks[what] = f"{instead}: {problems[what]}"
        else:
            hooks[what] = "ok"
    notes = [
        f"{name}: {count - before.get((name, text), 0)} event(s) could not be read ({text})"
        for (name, text), count in failures().items()
        if count > before.get((name, text), 0)
    ]
    return hooks, notes
