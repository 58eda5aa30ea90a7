"""Recompiles: which guard failed, what changed and to what, attributed to the cache entry that the call is closest to.

What failed is found in `explain`, what it means is judged in `causes`, what to do about it is in `recompile_fixes`.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from optpass.backend.audit import recompile_fixes
from optpass.backend.audit.eager_calls import FRAMES, EagerEvent
from optpass.backend.audit.explain import Why, explain, is_limit
from optpass.backend.audit.findings import Finding
from optpass.backend.audit.locations import Function
from optpass.backend.audit.recompiles_logged import RecompileReader
from optpass.backend.audit.remembered import Remembered, remember
from optpass.backend.audit.silent_reasons import is_entry
from optpass.backend.compat import audit_guards as dynamo
from optpass.backend.compat.hooks import Args, Kwargs
from optpass.reporting.audit.model import Fix, Recompile

#: Values of one place that are kept, lengths for buckets among them; those that are told.
_KEPT, _TOLD = 4096, 64
#: What stands behind the source that a guard is about.
_SUBJECT = re.compile(r" (?:==|!=|<=?|>=?|is|in|not in) |, now ")


@dataclass
class _Seen:
    """What is known of one place of one function; `counts` of recompiles by frame."""

    record: Recompile
    finding: Finding
    dynamic: bool | None
    entry: bool
    values: dict[str, None] = field(default_factory=dict)  # in order, each once
    guards: list[str] = field(default_factory=list)
    seconds: float | None = None
    counts: Counter[str] = field(default_factory=Counter)


class RecompileCollector:
    """Records of recompiles, from `install` to `uninstall`.

    Attributes:
        problems: why recompiles are told less precisely, if so.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._made_for: weakref.WeakKeyDictionary[Any, Remembered] = weakref.WeakKeyDictionary()
        self._active = False
        self._log = RecompileReader(self._on_logged)

    def install(self) -> None:
        """Start to watch; more than one collector may."""
        if self._active:
            return
        problem = dynamo.COMPILE.add(self)
        self.problems = [f"{problem}: {dynamo.COMPILE.loses}"] if problem is not None else []
        self._active = True
        FRAMES.listen(self)
        if problem is not None and not self._log.start():
            self.problems.append("Dynamo's trace log is missing as well: recompiles are not known")

    def uninstall(self) -> None:
        """Stop to watch; what was seen stays."""
        if self._active:
            self._log.stop()
            dynamo.COMPILE.remove(self)
            FRAMES.leave(self)
            self._active = False

    def records(self) -> list[Recompile]:
        """What was seen so far, in order; may be called at any time."""
        with self._lock:
            return [_record(seen) for seen in self._seen.values()]

    def on_eager(self, event: EagerEvent) -> None:
        """Nothing: calls that run eager are the silent ledger's; only the modes of a call are asked of the frames."""

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        """A frame is about to be compiled: guards can be evaluated on what it was called with."""
        call = dynamo.compile_call(args, kwargs)
        why = explain(call, self._made_for, FRAMES.modes_of_call()) if call.entries else None
        if why is not None:
            origin = dynamo.user_code(call.code)
            why = replace(why, entry=is_entry(origin if origin is not call.code else None))
        return call, why, time.perf_counter()

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        """It has been compiled, or not."""
        if token is None:
            return
        call, why, start = token
        seconds = time.perf_counter() - start
        manager = getattr(getattr(result, "guarded_code", None), "guard_manager", None)
        if manager is not None:
            self._made_for[manager] = remember(manager, call)
        if why is not None:
            with self._lock:
                self._file(why, seconds, refused=error is not None and is_limit(error))

    def _on_logged(self, function: Function, finding: Finding, guard: str) -> None:
        """The trace log tells of a recompile, where compiles cannot be watched."""
        with self._lock:
            self._file(Why(function, finding, (guard,), None, function[2]), None, refused=False)

    def _file(self, why: Why, seconds: float | None, *, refused: bool) -> None:
        finding = why.finding
        key = (*why.function, finding.cause, finding.source)
        seen = self._seen.get(key)
        if seen is None:
            if refused:
                return  # the limit's own record says so; nothing was compiled
            file, line, function = why.function
            record = Recompile(
                file=file,
                line=line,
                function=function,
                cause=finding.cause,
                source=finding.source,
                before=finding.before,
                after=finding.after,
            )
            seen = self._seen[key] = _Seen(record, finding, why.dynamic, why.entry)
        for value in (finding.before, finding.after) if not finding.dynamic else (finding.after,):
            if value and len(seen.values) < _KEPT:
                seen.values.setdefault(value)
        if not refused:
            told = {_subject(guard) for guard in seen.guards}
            new = [guard for guard in why.guards if _subject(guard) not in told]
            seen.guards += new[: _TOLD - len(seen.guards)]
            seen.counts[why.frame] += 1
            seen.seconds = seconds if seen.seconds is None else seen.seconds + (seconds or 0.0)


def _subject(guard: str) -> str:
    return _SUBJECT.split(guard, maxsplit=1)[0]


def _record(seen: _Seen) -> Recompile:
    # What goes on behind a break is compiled again with its function: the same change, not one more.
    most = max(seen.counts.values(), default=0)
    text = recompile_fixes.advice(seen.finding, list(seen.values), most, seen.dynamic, entry=seen.entry)
    update = {
        "count": seen.counts.total(),
        "values": list(seen.values)[:_TOLD],
        "guards": list(seen.guards),
        "seconds": seen.seconds,
        "fix": Fix(text=text),
    }
    return seen.record.model_copy(update=update)
