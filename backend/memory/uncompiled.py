"""Says so where what is to keep a memory budget runs in eager: no graph of it gets here, and nothing is planned."""

from __future__ import annotations

import logging
import types

from optpass.backend.audit.calls import Tally
from optpass.backend.audit.events import FrameEvent
from optpass.backend.audit.locations import is_torch
from optpass.backend.audit.silent_reasons import is_entry
from optpass.backend.audit.standing import BACKEND
from optpass.errors import ConfigError
from optpass.options import resolve
from optpass.reporting import store

log = logging.getLogger(__name__)


class Uncompiled:
    """Warns of each function once that Dynamo gives up on as a whole and that was compiled with a budget."""

    def __init__(self) -> None:
        self._said: set[tuple[str, int]] = set()

    def on_frame(self, event: FrameEvent) -> None:
        """A frame was compiled, or Dynamo gave up on it."""
        code = event.origin
        # Dynamo goes on behind a break, but not in code of torch's: of a `Sequential` the rest runs in eager.
        # Nor need it: a DistributedDataParallel hands its call on to a module whose forward is compiled by itself.
        goes_on = event.wraps is not None and not is_torch(event.wraps)
        broken = code is not None and bool(event.breaks) and is_torch(code) and not goes_on
        if code is None or event.backend != BACKEND or not (event.left or broken):
            return
        if not is_entry() or not _has_budget(event):
            return
        place = code.co_filename, code.co_firstlineno
        if place in self._said:
            return
        self._said.add(place)
        reason = event.breaks[-1].kind if event.breaks else event.error
        why = ": Dynamo gave up on it" if event.left else " behind a graph break, for it is torch's own code"
        text = (
            f"memory budget: {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) runs in eager, and its "
            f"memory is not planned{why} ({reason or event.error}); `optpass audit` says where and what helps"
        )
        log.warning("%s", text)
        store.current().warn(text)

    def forget(self) -> None:
        """Warn of what is met again."""
        self._said.clear()

    def tally(self, code: types.CodeType) -> Tally:
        """As for every listener; it asks for no times."""
        return Tally()


def _has_budget(event: FrameEvent) -> bool:
    try:
        return resolve(event.options).budget is not None
    except ConfigError:  # it is raised where a graph is compiled, and here there is none
        return "memory_budget" in event.options


UNCOMPILED = Uncompiled()
