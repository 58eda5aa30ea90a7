"""The recording that the backend keeps by itself: breaks and recompiles of what it compiles, for `optpass.report()`.

It begins when Dynamo looks the backend up, before the first frame is traced, and costs compile time only.
"""

from __future__ import annotations

import os
import threading

from optpass.backend.audit.recording import Recording
from optpass.backend.audit.watch import WATCH, Listener
from optpass.reporting.audit.model import Audit

BACKEND = "optpass"


class Standing:
    """One light recording per process, begun once, forgotten with the report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._beside: tuple[Listener, ...] = ()

    def beside(self, listener: Listener) -> None:
        """Give the frames that are compiled to `listener` too, while there is a recording."""
        with self._lock:
            self._beside = (*self._beside, listener)
            if self._recording is not None:
                WATCH.listen(listener, time_calls=False)

    def begin(self) -> None:
        """Record from now on; without effect where it does already."""
        with self._lock:
            if self._recording is None:
                self._recording = Recording(time_calls=False, backend=BACKEND)
                self._recording.start()
                for listener in self._beside:
                    WATCH.listen(listener, time_calls=False)

    def ask(self, wanted: bool) -> None:
        """What the options of a compile ask for: one that asks for none ends it, the next that does not begins anew."""
        if wanted:
            self.begin()
        else:
            self.end()

    def end(self) -> None:
        """Record no longer, and forget."""
        with self._lock:
            recording, self._recording = self._recording, None
        if recording is not None:
            for listener in self._beside:
                WATCH.leave(listener)
            recording.stop()

    def clear(self) -> None:
        """Forget what was recorded; go on if it was recording."""
        with self._lock:
            active = self._recording is not None
        self.end()
        if active:
            self.begin()

    def result(self) -> Audit | None:
        """What was recorded; None where nothing is."""
        with self._lock:
            recording = self._recording
        return recording.result() if recording is not None else None

    def after_fork(self) -> None:
        """In a forked child: what was recorded is the parent's, and its lock may be held by a thread not here."""
        active = self._recording is not None
        self._lock = threading.Lock()
        self._recording = None
        if active:
            self.begin()


STANDING = Standing()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STANDING.after_fork)
