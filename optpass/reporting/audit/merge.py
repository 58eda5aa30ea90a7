"""Audits of several processes as one, and the counts of a merged audit. No files, no rendering."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from optpass.errors import AuditError
from optpass.reporting.audit.model import Audit, AuditSummary, Break, BreakCost, FunctionRecord, Recompile, SilentEager
from optpass.reporting.model import ProcessRecord

_T = TypeVar("_T")
_R = TypeVar("_R", Recompile, SilentEager)


def merge(audits: Iterable[Audit]) -> Audit:
    """Several audits as one: each source break, recompile cause and function once.

    Occurrences, calls and counts are summed over processes; times and bytes are NOT, they are those of the process
    that had most, since ranks run at the same time. Give each process once.

    Raises:
        AuditError: nothing to merge.
    """
    parts = [audit.model_copy(deep=True) for audit in audits]
    if not parts:
        raise AuditError("no audit to merge; give at least one")
    if len(parts) == 1:
        return parts[0]
    parts.sort(key=_rank)
    merged = _header(parts)
    merged.breaks = _breaks(parts)
    merged.recompiles = _recompiles(parts)
    merged.silent_eager = _silent(parts)
    merged.functions = _functions(parts)
    merged.summary = _summary(parts, merged)
    return merged


def _rank(audit: Audit) -> int:
    return min((process.rank for process in audit.processes), default=0)


def _header(parts: Sequence[Audit]) -> Audit:
    first = parts[0]
    differing = sorted({k for part in parts for k, v in part.environment.items() if first.environment.get(k, v) != v})
    notes = [f"processes differ in {', '.join(differing)}; the first one's environment is shown"] if differing else []
    ended = {_who(part): part.partial for part in parts if part.partial}
    processes: dict[tuple[str, int], ProcessRecord] = {(p.host, p.pid): p for part in parts for p in part.processes}
    hooks = {name: told for part in reversed(parts) for name, told in part.hooks.items()}
    return Audit(
        run_id=first.run_id,
        root=first.root,
        target=first.target,
        created=max(part.created for part in parts),
        partial=_together(ended),
        exit_code=next((part.exit_code for part in parts if part.exit_code), first.exit_code),
        environment=first.environment,
        processes=sorted(processes.values(), key=lambda process: process.rank),
        hooks=hooks,
        notes=list(dict.fromkeys([*(note for part in parts for note in part.notes), *notes])),
    )


def _who(part: Audit) -> str:
    return ", ".join(str(process.rank) for process in part.processes) or "?"


def _together(ended: Mapping[str, str]) -> str | None:
    causes = list(dict.fromkeys(ended.values()))
    if len(causes) <= 1:
        return next(iter(causes), None)
    return "; ".join(f"rank {who}: {cause}" for who, cause in ended.items())


def _breaks(parts: Sequence[Audit]) -> list[Break]:
    """Breaks by place and kind, those that processes share first; what each follows from by its new index."""
    kept: dict[tuple[object, ...], Break] = {}
    parents: dict[tuple[object, ...], tuple[object, ...]] = {}
    for part in parts:
        for record in part.breaks:
            key = _break_key(record)
            if record.caused_by is not None and 0 <= record.caused_by < len(part.breaks):
                parents.setdefault(key, _break_key(part.breaks[record.caused_by]))
            known = kept.get(key)
            if known is None:
                kept[key] = record
                continue
            known.occurrences += record.occurrences
            known.cost = _larger_cost(known.cost, record.cost)
            known.fix = known.fix if known.fix.text or known.fix.diff else record.fix
    index = {key: i for i, key in enumerate(kept)}
    for key, record in kept.items():
        parent = parents.get(key)
        record.caused_by = index.get(parent) if parent is not None and parent != key else None
    return list(kept.values())


def _break_key(record: Break) -> tuple[object, ...]:
    return (record.file, record.line, record.column, record.gb_type)


def _larger_cost(a: BreakCost, b: BreakCost) -> BreakCost:
    return BreakCost(**{name: largest((getattr(a, name), getattr(b, name))) for name in BreakCost.model_fields})


def largest(values: Iterable[float | None]) -> float | None:
    """The largest of the values that are known; None where none is."""
    return max((value for value in values if value is not None), default=None)


def _recompiles(parts: Sequence[Audit]) -> list[Recompile]:
    kept: dict[tuple[object, ...], Recompile] = {}
    for record in (record for part in parts for record in part.recompiles):
        known = kept.setdefault((record.file, record.line, record.function, record.cause, record.source), record)
        if known is not record:
            known.count += record.count
            known.values = list(dict.fromkeys([*known.values, *record.values]))
            known.seconds = largest((known.seconds, record.seconds))
    return list(kept.values())


def _silent(parts: Sequence[Audit]) -> list[SilentEager]:
    kept: dict[tuple[object, ...], SilentEager] = {}
    called = {(record.file, record.line, record.function) for part in parts for record in part.functions}
    for record in (record for part in parts for record in part.silent_eager):
        if record.kind == "not compiled" and (record.file, record.line, record.function) in called:
            continue  # one process has called what others only handed out
        known = kept.setdefault((record.file, record.line, record.function, record.kind), record)
        if known is not record and record.calls is not None:
            known.calls = (known.calls or 0) + record.calls
    return list(kept.values())


def _functions(parts: Sequence[Audit]) -> list[FunctionRecord]:
    kept: dict[tuple[object, ...], FunctionRecord] = {}
    for record in (record for part in parts for record in part.functions):
        known = kept.setdefault((record.file, record.line, record.function), record)
        if known is not record:
            for name in ("graphs", "compiles", "calls"):
                setattr(known, name, getattr(known, name) + getattr(record, name))
            # One call's operations: those of the process that captured the smaller share stand for all.
            if _share(record) < _share(known):
                known.ops_captured, known.ops_total = record.ops_captured, record.ops_total
            known.compile_s = max(known.compile_s, record.compile_s)
            for name in ("t_first_s", "t_steady_s", "guard_us"):
                setattr(known, name, largest((getattr(known, name), getattr(record, name))))
    return list(kept.values())


def _share(record: FunctionRecord) -> float:
    return record.ops_captured / record.ops_total if record.ops_total else 1.0


def _summary(parts: Sequence[Audit], merged: Audit) -> AuditSummary:
    return AuditSummary(
        graphs=sum(part.summary.graphs for part in parts),
        breaks=sum(record.caused_by is None for record in merged.breaks),
        recompiles=sum(part.summary.recompiles for part in parts),
        silent_eager=len(merged.silent_eager),
        ops_captured_fraction=_fraction(parts),
        t_first_s=largest(part.summary.t_first_s for part in parts),
        t_steady_s=largest(part.summary.t_steady_s for part in parts),
    )


def _fraction(parts: Sequence[Audit]) -> float | None:
    """Mean over the processes where it is known, each weighed by its operations in graphs (at least 1)."""
    known = [
        (part.summary.ops_captured_fraction, max(sum(f.ops_captured for f in part.functions), 1))
        for part in parts
        if part.summary.ops_captured_fraction is not None
    ]
    return sum(share * weight for share, weight in known) / sum(w for _, w in known) if known else None
