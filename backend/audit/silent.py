"""Code that the user asked to compile and that runs uncompiled without a word.

Why Dynamo leaves a frame to eager is judged in `silent_reasons`, calls are told by `eager_calls`; what never gets as
far as Dynamo's callback (environment, stances, functions that are never called) is watched in `never_compiled`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from optpass.backend.audit.eager_calls import FRAMES, EagerEvent
from optpass.backend.audit.never_compiled import OUTSIDE
from optpass.backend.audit.silent_reasons import Verdict
from optpass.reporting.audit.model import Fix, SilentEager


@dataclass
class _Entry:
    verdict: Verdict
    calls: int | None = 0
    stopped: bool = False


class SilentCollector:
    """The silent eager ledger, from `install` to `uninstall`.

    Attributes:
        problems: what could not be watched in this torch.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._active = False

    def install(self) -> None:
        """Start to watch; more than one collector may."""
        if self._active:
            return
        self._active = True
        FRAMES.listen(self)
        OUTSIDE.listen(self)
        self.problems = [*FRAMES.problems, *OUTSIDE.problems]

    def uninstall(self) -> None:
        """Stop to watch; what was seen stays."""
        if not self._active:
            return
        for verdict in self._idle():
            self.on_eager(EagerEvent(verdict, countable=False))
        self._active = False
        OUTSIDE.leave(self)
        FRAMES.leave(self)

    def records(self) -> list[SilentEager]:
        """What was seen so far, in order; may be called at any time."""
        idle = self._idle() if self._active else []
        with self._lock:
            return [_record(entry) for entry in (*self._entries.values(), *(_Entry(v, None) for v in idle))]

    def _idle(self) -> list[Verdict]:
        """Functions that were compiled and never called, and of which nothing else is known."""
        found = OUTSIDE.never_called(self)
        with self._lock:
            known = {key[1:] for key in self._entries}
        return [verdict for verdict in found if verdict.place not in known]

    def on_eager(self, event: EagerEvent) -> None:
        """A call ran eager."""
        verdict = event.verdict
        with self._lock:
            key = (verdict.kind, *verdict.place)
            entry = self._entries.setdefault(key, _Entry(verdict))
            entry.calls = None if entry.calls is None or not event.countable else entry.calls + 1
            entry.stopped = entry.stopped or event.last


def _record(entry: _Entry) -> SilentEager:
    file, line, function = entry.verdict.place
    reason = entry.verdict.reason + (" Calls are counted up to here." if entry.stopped else "")
    return SilentEager(
        file=file,
        line=line,
        function=function,
        kind=entry.verdict.kind,
        calls=entry.calls,
        reason=reason,
        fix=Fix(text=entry.verdict.fix),
    )
