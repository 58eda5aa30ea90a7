"""Recompiles: which guard failed, what changed and to what, attributed to the cache entry that the call is closest to.

What failed is found in `explain`, what it means is judged in `causes`, what to do about it is in `recompile_fixes`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from optpass.backend.audit import recompile_fixes
from optpass.backend.audit.eager_calls import FRAMES, EagerEvent
from optpass.backend.audit.explain import Why, conditioned, explain, is_limit
from optpass.backend.audit.findings import Finding
from optpass.backend.compat import audit_guards as dynamo
from optpass.backend.compat.hooks import Args, Kwargs
from optpass.reporting.audit.model import Fix, Recompile

_VALUES = 64


@dataclass
class _Seen:
    """What is known of one place of one function; `counts` of recompiles by frame."""

    record: Recompile
    finding: Finding
    dynamic: bool | None
    values: list[str] = field(default_factory=list)
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


class RecompileCollector:
    """Records of recompiles, from `install` to `uninstall`.

    Attributes:
        problems: why recompiles could not be explained, if so.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._made_for: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        self._active = False

    def install(self) -> None:
        """Start to watch; more than one collector may."""
        if self._active:
            return
        problem = dynamo.COMPILE.add(self)
        self.problems = [problem] if problem is not None else []
        self._active = problem is None
        if self._active:
            FRAMES.listen(self)

    def uninstall(self) -> None:
        """Stop to watch; what was seen stays."""
        if self._active:
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
        return call, why, time.perf_counter()

    def after(self, token: Any, args: Args, result: Any, error: BaseException | None) -> None:
        """It has been compiled, or not."""
        if token is None:
            return
        call, why, start = token
        seconds = time.perf_counter() - start
        manager = getattr(getattr(result, "guarded_code", None), "guard_manager", None)
        if manager is not None:
            self._made_for[manager] = conditioned(manager, call)
        if why is not None:
            with self._lock:
                self._file(why, seconds, refused=error is not None and is_limit(error))

    def _file(self, why: Why, seconds: float, *, refused: bool) -> None:
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
                guards=list(why.guards),
            )
            seen = self._seen[key] = _Seen(record, finding, why.dynamic)
        for value in (finding.before, finding.after) if not finding.dynamic else (finding.after,):
            if value and value not in seen.values and len(seen.values) < _VALUES:
                seen.values.append(value)
        if not refused:
            seen.counts[why.frame] += 1
            seen.seconds += seconds


def _record(seen: _Seen) -> Recompile:
    # What goes on behind a break is compiled again with its function: the same change, not one more.
    most = max(seen.counts.values(), default=0)
    text = recompile_fixes.advice(seen.finding, seen.values, most, seen.dynamic)
    update = {
        "count": seen.counts.total(),
        "values": list(seen.values),
        "seconds": seen.seconds,
        "fix": Fix(text=text),
    }
    return seen.record.model_copy(update=update)
