"""`Recording`: watches Dynamo from `start` to `stop` and gives what it saw as one `Audit`.

Several may be active at once, in several threads; each sees everything that happens while it is active, in any thread.
Dynamo is never reset. Collecting is the collectors' business; rendering, fixes and scripts are not here.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from optpass.backend.audit.breaks import BreakCollector, only_roots
from optpass.backend.audit.calls import Tally
from optpass.backend.audit.events import FrameEvent
from optpass.backend.audit.functions import FunctionCollector
from optpass.backend.audit.places import Places
from optpass.backend.audit.recompiles import RecompileCollector
from optpass.backend.audit.selftest import failures, how_observed
from optpass.backend.audit.silent import SilentCollector
from optpass.backend.audit.watch import WATCH
from optpass.backend.compat.audit_guards import guard_problems
from optpass.reporting.audit.model import Audit, AuditSummary, Break, FunctionRecord, Recompile, SilentEager
from optpass.reporting.environment import environment, process_record


class Recording:
    """Breaks, recompiles, silent eager and functions, from `start` to `stop`; also a context manager.

    Args:
        user_roots: folders whose lines are the user's; None: see `places.Places`.
        time_calls: time calls of compiled functions, and have torch's profiler watch calls of each where graphs
            break, for the share of operations that graphs hold: the first, and then those up to one without a compile.
        backend: record only what is compiled with the backend of this name; None: everything.
    """

    def __init__(
        self, *, user_roots: Sequence[Path] | None = None, time_calls: bool = True, backend: str | None = None
    ) -> None:
        self._time_calls = time_calls
        self._backend = backend
        self._lock = threading.RLock()
        self._active = 0
        self._failures = failures()
        self._breaks = BreakCollector(Places(user_roots))
        self._functions = FunctionCollector(observe=time_calls)
        self._recompiles = RecompileCollector()
        self._silent = SilentCollector()

    def start(self) -> None:
        """Watch from now on. A second `start` needs a second `stop`."""
        with self._lock:
            self._active += 1
            if self._active == 1:
                WATCH.listen(self, time_calls=self._time_calls)
                self._recompiles.install()
                self._silent.install()

    def stop(self) -> None:
        """Watch no longer; without effect where it is not active."""
        with self._lock:
            if self._active == 0:
                return
            self._active -= 1
            if self._active == 0:
                self._silent.uninstall()
                self._recompiles.uninstall()
                WATCH.leave(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    # ---- what the watch tells ---------------------------------------------------------------------------------

    def on_frame(self, event: FrameEvent) -> None:
        """A frame was compiled, or Dynamo gave up on it."""
        if self._backend is not None and event.backend != self._backend:
            return
        self._breaks.on_frame(event)
        self._functions.on_frame(event)

    def tally(self, code: types.CodeType) -> Tally:
        """A compiled function is called: where its calls are counted."""
        return self._functions.tally(code)

    # ---- result -----------------------------------------------------------------------------------------------

    def result(self, target: str = "", *, costs: bool = False) -> Audit:
        """Everything seen so far, ranked by cost; may be called at any time, from any thread.

        Args:
            costs: predict what fusion each break loses too; some tenths of a second per break, once.
        """
        if costs:
            self._breaks.price()
        process = process_record()
        breaks = self._breaks.records(process.rank)
        functions = self._functions.records()
        recompiles = [r for r in self._recompiles.records() if self._is_ours(r)]
        silent = [r for r in self._silent.records() if self._is_ours(r)]
        collectors = {
            "recompiles": [*self._recompiles.problems, *guard_problems()],
            "silent eager": self._silent.problems,
        }
        hooks, notes = how_observed(WATCH.problems, WATCH.fallback, self._failures, collectors)
        return Audit(
            target=target,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            environment=environment(),
            processes=[process],
            summary=_summary(self._functions.graphs(), breaks, recompiles, silent, functions),
            breaks=breaks,
            recompiles=recompiles,
            silent_eager=silent,
            functions=functions,
            hooks=hooks,
            notes=notes,
        )

    def _is_ours(self, record: Recompile | SilentEager) -> bool:
        """Whether its function is one that this recording is about."""
        return self._backend is None or self._functions.knows(record.file, record.line)


def _summary(
    graphs: int,
    breaks: Sequence[Break],
    recompiles: Sequence[Recompile],
    silent: Sequence[SilentEager],
    functions: Sequence[FunctionRecord],
) -> AuditSummary:
    called = [f for f in functions if f.calls] or list(functions)
    counted = [f for f in called if f.ops_total is not None]
    total = sum(f.ops_total or 0 for f in counted)
    known = bool(total) and len(counted) == len(called)
    first = [f.t_first_s for f in functions if f.t_first_s is not None]
    steady = [f.t_steady_s for f in functions if f.t_steady_s is not None]
    return AuditSummary(
        graphs=graphs,
        breaks=len(only_roots(breaks)),
        recompiles=sum(record.count for record in recompiles),
        silent_eager=len(silent),
        ops_captured_fraction=sum(f.ops_captured for f in counted) / total if known else None,
        t_first_s=sum(first) if first else None,
        t_steady_s=sum(steady) if steady else None,
    )
