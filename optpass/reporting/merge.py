"""Sums over graphs and over processes: totals, compile cost, and several reports as one. No files, no rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from optpass.errors import ReportError
from optpass.reporting.audit.merge import merge as merge_audits
from optpass.reporting.model import CompileCost, DeviceRecord, GraphRecord, Group, Op, ProcessRecord, Report, Totals

_ADDED = ("flops", "flops_forward", "flops_backward", "bytes_unfused", "bytes_fused", "kernels")
_TIMES = ("time_us", "time_unfused_us")
_COSTS = ("t_compile_s", "t_passes_s", "t_first_s", "t_steady_s")
_R = TypeVar("_R", Op, Group)


def merge(reports: Iterable[Report], *, across_runs: bool = False) -> Report:
    """Several reports as one: processes and graphs one after another, indices and ids rewritten.

    With more than one process, graph ids become `process/graph` ("1/0"), also in ops and groups. A process that
    occurs twice in the same run (same pid and host) is taken from the later report. Totals: FLOPs, bytes and kernels
    are summed over processes; times are NOT, they are the slowest process's, since ranks run at the same time. The
    same holds for compile cost. MFU counts one device per process that compiled something.

    Args:
        across_runs: merge reports of different runs too; no process then replaces another run's.

    Raises:
        ReportError: nothing to merge, different runs without `across_runs`, or a graph of a process that the report
            does not list.
    """
    given = [part.model_copy(deep=True) for part in reports]
    if not given:
        raise ReportError("no report to merge; give at least one")
    kept = _kept_processes(given)
    parts = [part for part in given if any(part is source for source, _, _ in kept)] or given
    runs = list(dict.fromkeys(part.run_id for part in parts))
    if len(runs) > 1 and not across_runs:
        raise ReportError(f"reports of {len(runs)} different runs ({', '.join(runs)}); merge reports of one run")
    merged = _header(parts, runs)
    for part, process_index, process in kept:
        _append(merged, part, process_index, process)
    _number(merged)
    audits = [part.audit for part in parts if part.audit is not None]
    merged.audit = merge_audits(audits) if audits else None
    merged.compile = compile_cost(merged.graphs)
    merged.totals = totals(merged.graphs, merged.ops, merged.device)
    merged.unknown_ops = unknown_ops(merged.graphs)
    return merged


def _kept_processes(parts: Sequence[Report]) -> list[tuple[Report, int, ProcessRecord]]:
    """(report, index in it, process), the last report's record of each process, ordered by rank then first seen."""
    kept: dict[tuple[str, str, int], tuple[Report, int, ProcessRecord]] = {}
    for part in parts:
        for graph in part.graphs:
            if not 0 <= graph.process < len(part.processes):
                raise ReportError(f"graph {graph.id!r} names process {graph.process}, which its report does not list")
        for index, process in enumerate(part.processes):
            kept[(part.run_id, process.host, process.pid)] = (part, index, process)
    return sorted(kept.values(), key=lambda item: item[2].rank)


def _header(parts: Sequence[Report], runs: Sequence[str]) -> Report:
    """Everything but the records: the first report's facts, and a warning where the others differ from them."""
    first = parts[0]
    merged = Report(
        run_id=first.run_id,
        created=max(part.created for part in parts),
        name=next((part.name for part in parts if part.name), ""),
        environment=first.environment,
        options=next((part.options for part in parts if part.options), {}),
        device=next((part.device for part in parts if part.device is not None), None),
        training=next((part.training for part in parts if part.training), {}),
        warnings=list(dict.fromkeys(text for part in parts for text in part.warnings)),
    )
    notes = []
    if len(runs) > 1:
        notes.append(f"merged from {len(runs)} different runs; totals add work that did not run together")
    devices = list(dict.fromkeys(part.device.name for part in parts if part.device is not None))
    if len(devices) > 1:
        notes.append(f"processes used different devices ({', '.join(devices)}); MFU refers to {devices[0]}")
    if any(part.options and part.options != merged.options for part in parts):
        notes.append("processes ran with different options; those of the first are shown")
    differing = sorted({k for part in parts for k, v in part.environment.items() if first.environment.get(k, v) != v})
    if differing:
        notes.append(f"processes differ in {', '.join(differing)}; the first one's environment is shown")
    merged.warnings = list(dict.fromkeys([*merged.warnings, *notes]))
    return merged


def _append(merged: Report, part: Report, old_index: int, process: ProcessRecord) -> None:
    """Take one process's graphs, ops and groups over, under a provisional id that `_number` may shorten.

    The part's own records stay as they are: indices and ids of its other processes are still to be looked up in it.
    """
    new_index = len(merged.processes)
    merged.processes.append(process)
    mine = [graph for graph in part.graphs if graph.process == old_index]
    renamed = {graph.id: f"{new_index}/{graph.id.rpartition('/')[2]}" for graph in mine}
    merged.graphs += [graph.model_copy(update={"id": renamed[graph.id], "process": new_index}) for graph in mine]
    merged.ops += _renamed(part.ops, renamed)
    merged.groups += _renamed(part.groups, renamed)


def _renamed(records: Sequence[_R], renamed: Mapping[str, str]) -> list[_R]:
    return [r.model_copy(update={"graph": renamed[r.graph]}) for r in records if r.graph in renamed]


def _number(merged: Report) -> None:
    if len(merged.processes) > 1:
        return
    for graph in merged.graphs:
        graph.id = graph.id.rpartition("/")[2]
    for op in merged.ops:
        op.graph = op.graph.rpartition("/")[2]
    for group in merged.groups:
        group.graph = group.graph.rpartition("/")[2]


def totals(graphs: Sequence[GraphRecord], ops: Sequence[Op], device: DeviceRecord | None) -> Totals:
    """Graph totals summed within a process; over processes, work summed and the slowest one's time taken."""
    per_process: dict[int, Totals] = {}
    for graph in graphs:
        total = per_process.setdefault(graph.process, Totals())
        for name in (*_ADDED, *_TIMES):
            setattr(total, name, getattr(total, name) + getattr(graph.totals, name))
    result = Totals()
    for total in per_process.values():
        for name in _ADDED:
            setattr(result, name, getattr(result, name) + getattr(total, name))
        for name in _TIMES:
            setattr(result, name, max(getattr(result, name), getattr(total, name)))
    result.mfu = mfu(result, ops, device, devices=max(len(per_process), 1))
    return result


def mfu(total: Totals, ops: Sequence[Op], device: DeviceRecord | None, *, devices: int = 1) -> float:
    """Model FLOPs utilisation: flops / (time x dense peak x devices); 0 where time or peak is not known.

    The peak is that of the dtype in which most matmul FLOPs are done (most FLOPs of any kind where there is no
    matmul). Defined as in PaLM (Chowdhery et al. 2022, appendix B), with the FLOPs counted rather than 6N.
    """
    dtype = main_dtype(ops, device)
    if device is None or dtype is None or total.time_us <= 0:
        return 0.0
    return total.flops / (total.time_us * 1e-6 * device.peak_flops[dtype] * devices)


def main_dtype(ops: Sequence[Op], device: DeviceRecord | None) -> str | None:
    """The dtype that most matmul FLOPs (else most FLOPs) are done in, among those the device has a peak for."""
    known = {name for name, peak in device.peak_flops.items() if peak > 0} if device is not None else set()
    for matmul_only in (True, False):
        flops: dict[str, float] = {}
        for op in ops:
            if op.dtype in known and (op.mnk is not None or not matmul_only):
                flops[op.dtype] = flops.get(op.dtype, 0.0) + op.flops
        if flops:
            return max(sorted(flops), key=lambda name: flops[name])
    return None


def compile_cost(graphs: Sequence[GraphRecord]) -> CompileCost:
    """Seconds summed over a process's graphs; over processes the largest of each sum."""
    sums: dict[int, dict[str, float]] = {}
    for graph in graphs:
        mine = sums.setdefault(graph.process, dict.fromkeys(_COSTS, 0.0))
        for name in _COSTS:
            mine[name] += getattr(graph, name) or 0.0
    slowest = {name: max((mine[name] for mine in sums.values()), default=0.0) for name in _COSTS}
    return CompileCost(graphs=len(graphs), **slowest)


def unknown_ops(graphs: Sequence[GraphRecord]) -> dict[str, int]:
    """Ops without a formula, counted over all graphs, most frequent first."""
    counts: Counter[str] = Counter()
    for graph in graphs:
        counts.update(graph.unknown_ops)
    return dict(counts.most_common())
