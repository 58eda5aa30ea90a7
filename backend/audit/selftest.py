"""How each thing was observed in this process, and what is less precise for want of a hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optpass.backend.compat import audit as dynamo
from optpass.backend.compat.audit_entry import ENTRY_POINTS
from optpass.backend.compat.audit_frames import FRAME
from optpass.backend.compat.audit_guards import COMPILE

Failures = dict[tuple[str, str], int]

_POINTS = (*dynamo.AUDIT_POINTS, COMPILE, FRAME, *ENTRY_POINTS)


def failures() -> Failures:
    """What watchers of this process raised so far, and how often, by (hook point, text)."""
    return {(p.name, text): count for p in _POINTS for text, count in p.failures.items()}


def how_observed(
    problems: Mapping[str, str], fallback: bool, before: Failures, collectors: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], list[str]]:
    """`Audit.hooks`, 'ok' for what is observed as it should be, and notes of events that could not be read.

    Args:
        problems: hook points that could not be installed, by what they observe, with what is lost.
        fallback: breaks are read from the trace log.
        before: `failures()` when the recording began.
        collectors: what each of the other collectors says is missing.
    """
    hooks: dict[str, Any] = {}
    for point in dynamo.AUDIT_POINTS:
        what = point.observes
        if what in problems:
            instead = "the structured trace log" if point is dynamo.LOG_GRAPH_BREAK and fallback else "not observed"
            hooks[what] = f"{instead}: {problems[what]}"
        else:
            hooks[what] = "ok"
    for what, missing in collectors.items():
        hooks[what] = "; ".join(dict.fromkeys(missing)) or "ok"
    notes = [
        f"{name}: {count - before.get((name, text), 0)} event(s) could not be read ({text})"
        for (name, text), count in failures().items()
        if count > before.get((name, text), 0)
    ]
    return hooks, notes
