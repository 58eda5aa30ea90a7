"""Breaks read from Dynamo's structured trace log, where its function that logs them cannot be watched.

Less precise: lines, but columns only where the text has them; no module path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from optpass.backend.audit.events import Place, RawBreak
from optpass.backend.compat import audit as dynamo

_ARTIFACT = "dynamo_graph_break_reason"
_HEAD = re.compile(r"^Graph break in user code at (?P<file>.+):(?P<line>\d+)$", re.MULTILINE)
_REASON = re.compile(
    r"^Graph Break Reason: (?P<reason>.*?)(?=^(?:User code traceback|Stack variable source)|\Z)", re.M | re.S
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+?)\s*$', re.MULTILINE)
_PREFIX = re.compile(r"^(?P<prefix>[^\n]*?):\n\n(?P<message>.*)\Z", re.DOTALL)
_RESUME = re.compile(r"torch_dynamo_resume_in_(?P<name>\w+?)_at_\d+$")


class TraceReader:
    """Listens to the trace log between `start` and `stop`."""

    def __init__(self, on_break: Callable[[RawBreak], None]) -> None:
        self._on_break = on_break
        log = dynamo.TraceListener(self._record)
        self.start, self.stop = log.start, log.stop

    def _record(self, name: str, metadata: dict[str, Any], payload: str) -> None:
        if name == _ARTIFACT and (found := parse(payload)) is not None:
            self._on_break(found)


def parse(payload: str) -> RawBreak | None:
    """The break that a `dynamo_graph_break_reason` tells of; None for a text of another form."""
    head, reason = _HEAD.search(payload), _REASON.search(payload)
    if head is None or reason is None:
        return None
    text = reason["reason"].strip()
    split = _PREFIX.match(text)
    prefix, message = (split["prefix"], split["message"]) if split else ("", text)
    traceback = payload[reason.end() :].partition("\nTraceback (most recent call last)")[0]
    frames = [
        Place(m["file"], int(m["line"]), _RESUME.sub(r"\g<name>", m["function"])) for m in _FRAME.finditer(traceback)
    ]
    if not frames or (frames[-1].file, frames[-1].line) != (head["file"], int(head["line"])):
        frames.append(Place(head["file"], int(head["line"]), ""))
    effect = "frame eager" if prefix.startswith("Failed to handle") else (
        "rest eager" if prefix.startswith("Encountered graph break that we cannot resume") else "split"
    )  # fmt: skip
    return RawBreak("", message, tuple(frames), (), None, effect)
