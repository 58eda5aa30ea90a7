"""The process's collector: records go in under a lock, `snapshot` gives a report. Files are `files`' business."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from optpass.errors import ReportError
from optpass.reporting import merge as _merging
from optpass.reporting.environment import environment, process_record, run_id
from optpass.reporting.files import read_json, write_json, write_merged
from optpass.reporting.merge import merge
from optpass.reporting.model import DeviceRecord, GraphRecord, Group, Op, Report, Totals

__all__ = ["ReportStore", "current", "environment", "merge", "read_json", "run_id", "write_json", "write_merged"]


class ReportStore:
    """Thread-safe collection of what one process compiled.

    Attributes:
        lock: re-entrant; hold it to change a record after it was added, so that `snapshot` sees no half a record.
    """

    def __init__(self) -> None:
        self._next_id = 0
        self._empty()

    def _empty(self) -> None:
        self.lock = threading.RLock()
        self._graphs: dict[str, GraphRecord] = {}
        self._ops: dict[str, list[Op]] = {}
        self._groups: dict[str, list[Group]] = {}
        self._warnings: dict[str, None] = {}
        self._device: DeviceRecord | None = None
        self._options: dict[str, Any] = {}
        self._training: dict[str, Any] = {}

    def next_id(self) -> str:
        """A graph id that this process has not used yet, also not before `clear`."""
        with self.lock:
            self._next_id += 1
            return str(self._next_id - 1)

    def add_graph(self, record: GraphRecord) -> GraphRecord:
        """File a graph; returns the record, which the caller may go on changing under `lock`.

        Raises:
            ReportError: the id is taken.
        """
        with self.lock:
            if record.id in self._graphs:
                raise ReportError(f"graph {record.id!r} is in the report already; take ids from next_id()")
            self._graphs[record.id] = record
            return record

    def remove_graph(self, graph_id: str) -> None:
        """Forget a graph that was added, and what was found of it; no such graph is no error."""
        with self.lock:
            for filed in (self._graphs, self._ops, self._groups):
                filed.pop(graph_id, None)

    def add_analysis(
        self,
        graph_id: str,
        ops: Sequence[Op],
        groups: Sequence[Group],
        unknown: Mapping[str, int],
        totals: Totals,
    ) -> None:
        """File the roofline of a graph that was added; a second one for the same graph replaces the first.

        Raises:
            ReportError: no such graph.
        """
        with self.lock:
            if graph_id not in self._graphs:
                raise ReportError(f"graph {graph_id!r} is not in the report; add_graph comes first")
            record = self._graphs[graph_id]
            self._ops[graph_id] = [op.model_copy(update={"graph": graph_id}) for op in ops]
            self._groups[graph_id] = [group.model_copy(update={"graph": graph_id}) for group in groups]
            record.unknown_ops = dict(unknown)
            record.totals = totals.model_copy()

    def set_device(self, device: DeviceRecord) -> None:
        """The device that figures refer to; the first one stays, and a warning tells of any other."""
        with self.lock:
            if self._device is None:
                self._device = device.model_copy(deep=True)
            elif self._device.key != device.key:
                self.warn(f"analysed for {self._device.name} and for {device.name}; MFU refers to the first")

    def set_options(self, options: Mapping[str, Any]) -> None:
        """The resolved options, as plain data; those of the latest compile are shown."""
        with self.lock:
            self._options = dict(options)

    def set_training(self, training: Mapping[str, Any]) -> None:
        """What `optpass train` adds: `config`, `steps` ([{step, loss, step_s, tokens_per_s}]), `eager_loss`."""
        with self.lock:
            self._training = dict(training)

    def warn(self, text: str) -> None:
        """File a warning once, however often it is raised."""
        with self.lock:
            self._warnings.setdefault(" ".join(text.split()))

    def snapshot(self, name: str = "") -> Report:
        """A deep copy of everything so far, with the sums over graphs made now."""
        with self.lock:
            graphs = [graph.model_copy(deep=True) for graph in self._graphs.values()]
            ops = [op.model_copy() for graph in graphs for op in self._ops.get(graph.id, ())]
            groups = [g.model_copy(deep=True) for graph in graphs for g in self._groups.get(graph.id, ())]
            report = Report(
                run_id=run_id(),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                name=name,
                environment=environment(),
                options=self._options,
                processes=[process_record()],
                device=self._device,
                training=self._training,
                warnings=list(self._warnings),
            ).model_copy(deep=True)
        report.graphs, report.ops, report.groups = graphs, ops, groups
        report.compile = _merging.compile_cost(graphs)
        report.totals = _merging.totals(graphs, ops, report.device)
        report.unknown_ops = _merging.unknown_ops(graphs)
        return report

    def clear(self) -> None:
        """Forget everything filed; ids go on counting, so that no two graphs of a process share one."""
        with self.lock:
            kept = self.lock
            self._empty()
            self.lock = kept

    def after_fork(self) -> None:
        """In a forked child: the graphs are the parent's to report, and its lock may be held by a thread not here."""
        self._empty()


_CURRENT = ReportStore()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CURRENT.after_fork)


def current() -> ReportStore:
    """The store that this process's compiles file into."""
    return _CURRENT
