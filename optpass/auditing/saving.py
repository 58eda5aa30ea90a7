"""Saves the records of a running audit again and again, so that a killed process leaves them."""

from __future__ import annotations

import os
import threading
import time
import types
from pathlib import Path

from optpass.auditing.session import AuditSession
from optpass.backend.audit.calls import Tally
from optpass.backend.audit.events import FrameEvent
from optpass.backend.audit.watch import WATCH
from optpass.errors import OptPassError
from optpass.reporting.audit import files

#: Seconds from an event to the save that holds it, at least.
_SOON = 0.2
#: Seconds between saves where nothing was compiled: counts of calls and steady times only.
_IDLE = 10.0
#: Seconds of saving that a run may spend beforehand, so that a program that dies young leaves its first records; and
#: the part of the time that it may spend from there on.
_BURST, _SHARE = 0.1, 0.01


class Saver:
    """Writes a session's records to a file after every compile: at once where that takes little of the time, else soon.

    Its thread begins with the first compile.

    Args:
        session: a running one.
        path: of the file, replaced as a whole each time.
        always: write one also where nothing was compiled.
    """

    def __init__(self, session: AuditSession, path: Path, *, always: bool = True) -> None:
        self._session, self._path, self._always = session, path, always
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._spent = 0.0

    def start(self) -> None:
        """Begin to save."""
        WATCH.listen(self, time_calls=False)

    def stop(self) -> None:
        """Save no more; waits for a save that is being made."""
        WATCH.leave(self)
        self._halt()

    def pause(self) -> None:
        """Have no thread until something is compiled again; what is waiting to be saved is saved now."""
        waiting = self._changed.is_set()
        self._halt()
        if waiting:
            self._try()

    def _halt(self) -> None:
        thread, self._thread = self._thread, None
        self._ended.set()
        self._changed.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)
        self._changed.clear()

    def _work(self) -> None:
        """Have a thread that saves."""
        if self._thread is None:
            self._ended = threading.Event()  # each thread has its own: the one before may not have seen its end yet
            self._thread = threading.Thread(target=self._run, args=(self._ended,), name="optpass-audit", daemon=True)
            self._thread.start()

    def save(self) -> None:
        """Save now.

        Raises:
            AuditError: the file cannot be written.
        """
        with self._lock:
            start = time.thread_time()
            made = self._session.snapshot()
            if self._always or made.functions or made.breaks or made.recompiles or made.silent_eager:
                files.write(made, self._path)
            self._spent += time.thread_time() - start

    def on_frame(self, event: FrameEvent) -> None:
        """Something was compiled, or failed to."""
        if os.getpid() != self._pid:
            return  # a forked child: the file is the parent's
        if not (self._affordable() and self._try()):
            self._changed.set()
        self._work()

    def tally(self, code: types.CodeType) -> Tally:
        """Calls are not asked for: the recording counts them."""
        return Tally()

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self._changed.wait(_IDLE)
            if ended.wait(_SOON):
                return
            while not self._affordable():
                if ended.wait(_SOON):
                    return
            self._changed.clear()
            self._try()

    def _affordable(self) -> bool:
        return self._spent < _BURST + _SHARE * (time.monotonic() - self._began)

    def _try(self) -> bool:
        try:
            self.save()
        except (RuntimeError, OptPassError):  # records changed while they were read, or the disk is full: the next one
            return False
        return True
