"""Dynamo's structured trace log: what the audit falls back to where a function of Dynamo's cannot be watched."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import Any

OnRecord = Callable[[str, dict[str, Any], str], None]
_DEEPEST = 60


class TraceHandler(logging.Handler):
    """The log, record by record: `on_record(name, metadata, payload)`.

    Attributes:
        level_before: the log's own level, before any handler of this class was there.
    """

    level_before = logging.NOTSET

    def __init__(self, on_record: OnRecord) -> None:
        super().__init__(logging.DEBUG)
        self._on_record = on_record

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if not isinstance(metadata, dict):
            return
        kind = metadata.get("artifact")
        name = kind.get("name", "") if isinstance(kind, dict) else next(iter(metadata), "")
        payload = getattr(record, "payload", None)
        try:
            self._on_record(str(name), metadata, payload if isinstance(payload, str) else "")
        except Exception:  # noqa: BLE001  # logging's own way with a handler that fails
            self.handleError(record)


class TraceListener:
    """Calls `on_record` for what is logged between `start` and `stop`; several may listen."""

    def __init__(self, on_record: OnRecord) -> None:
        self._handler = TraceHandler(on_record)

    def start(self) -> bool:
        """Listen; False where torch has no such log."""
        log = trace_log()
        if log is None:
            return False
        if self._handler not in log.handlers:
            self._handler.level_before = next((h.level_before for h in _ours(log)), log.level)
            log.addHandler(self._handler)
            log.setLevel(min(log.level or logging.DEBUG, logging.DEBUG))
        return True

    def stop(self) -> None:
        """Listen no longer; the last one puts the log's level back."""
        log = trace_log()
        if log is not None and self._handler in log.handlers:
            log.removeHandler(self._handler)
            if not _ours(log):
                log.setLevel(self._handler.level_before)


def _ours(log: logging.Logger) -> list[TraceHandler]:
    return [handler for handler in log.handlers if isinstance(handler, TraceHandler)]


def trace_log() -> logging.Logger | None:
    """The logger that structured trace records go to."""
    from torch._logging import _internal

    found = getattr(_internal, "trace_log", None)
    return found if isinstance(found, logging.Logger) else None


def frame_in_compile() -> Any:
    """Dynamo's frame of the user's function that this thread compiles, from the stack of calls; None if there is none.

    For records that do not say what they are about. Dynamo's functions hand the frame on as `frame`.
    """
    caller: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if caller is None:
            return None
        if caller.f_globals.get("__name__", "").startswith("torch._dynamo."):
            found = caller.f_locals.get("frame")
            if isinstance(getattr(found, "f_code", None), types.CodeType):
                return found
        caller = caller.f_back
    return None
