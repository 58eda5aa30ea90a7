"""What the views say, worked out once for terminal and HTML: rankings, shares, groupings and advice. No rendering."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optpass.reporting.model import Analysis, Group, Op, Report

BOUNDS: tuple[str, ...] = ("compute", "memory", "launch", "unknown", "none")
#: A row of the Tensor Core's operand is 16 bytes wide; 128 bytes is what serves it best (NVIDIA, "Matrix
#: Multiplication Background User's Guide", table of multiples by dtype).
_FITS_BITS, _BEST_BITS = 128, 1024
_BITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class OpRow:
    """Identical ops (same operator, line, shape and figures, as in repeated layers), as one row."""

    op: Op
    module: str
    count: int
    time_us: float
    share: float


@dataclass(frozen=True)
class ModuleRow:
    """Ops of one module path, numbers in it as `*`; `instances` is how many such modules there are."""

    module: str
    instances: int
    ops: int
    flops: float
    bytes: float
    time_us: float
    share: float


@dataclass(frozen=True)
class MisalignedRow:
    """Matmuls of one shape that miss the Tensor Cores' alignment, and what to do about it."""

    op: Op
    module: str
    count: int
    time_us: float

    @property
    def advice(self) -> str:
        """See `advice`."""
        return advice(self.op)


@dataclass(frozen=True)
class BoundShare:
    """How much of the predicted time is spent under one bound; `share` is 0 to 1."""

    bound: str
    time_us: float
    share: float


@dataclass(frozen=True)
class GroupRow:
    """Identical fused kernels, as one row."""

    group: Group
    count: int
    time_us: float
    share: float


@dataclass(frozen=True)
class PassRow:
    """One pass over all graphs."""

    name: str
    stage: str
    graphs: int
    seconds: float
    applied: int
    declined: int
    errors: tuple[str, ...]


def place(file: str | None, line: int | None) -> str:
    """`model.py:12`, relative to the working directory where it lies below; empty where the file is not known."""
    if not file:
        return ""
    path = Path(file)
    shown = str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else file
    return f"{shown}:{line}" if line is not None else shown


@functools.lru_cache(maxsize=4096)
def general(module: str | None) -> str:
    """`blocks.3.attn` as `blocks.*.attn`."""
    return ".".join("*" if part.isdigit() else part for part in (module or "").split("."))


def rank_ops(ops: Sequence[Op]) -> list[OpRow]:
    """Every op, identical ones as one row, by predicted time alone; shares are of the sum over all ops."""
    total = math.fsum(op.time_us for op in ops)
    rows: dict[tuple[object, ...], list[Op]] = {}
    for op in ops:
        figures = (op.flops, op.bytes_read, op.bytes_written, op.time_us, op.bound, op.dtype, op.aligned)
        key = (op.target, op.phase, op.file, op.line, general(op.module), op.shape, op.mnk, *figures)
        rows.setdefault(key, []).append(op)
    ranked = [
        OpRow(
            op=same[0],
            module=_common_path([op.module for op in same]),
            count=len(same),
            time_us=math.fsum(op.time_us for op in same),
            share=_ratio(math.fsum(op.time_us for op in same), total),
        )
        for same in rows.values()
    ]
    return sorted(ranked, key=lambda row: -row.time_us)


def _common_path(modules: Sequence[str | None]) -> str:
    return modules[0] or "" if len(set(modules)) == 1 else general(modules[0])


def hot_modules(ops: Sequence[Op]) -> list[ModuleRow]:
    """Predicted time by module, repeated layers together, hottest first. Ops outside any module are "(no module)"."""
    total = math.fsum(op.time_us for op in ops)
    by_module: dict[str, list[Op]] = {}
    for op in ops:
        by_module.setdefault(general(op.module) or "(no module)", []).append(op)
    rows = [
        ModuleRow(
            module=module,
            instances=len({op.module for op in mine}),
            ops=len(mine),
            flops=math.fsum(op.flops for op in mine),
            bytes=math.fsum(op.bytes_read + op.bytes_written for op in mine),
            time_us=math.fsum(op.time_us for op in mine),
            share=_ratio(math.fsum(op.time_us for op in mine), total),
        )
        for module, mine in by_module.items()
    ]
    return sorted(rows, key=lambda row: -row.time_us)


def bound_shares(obj: Analysis | Report) -> list[BoundShare]:
    """Shares of the predicted time by what bounds it: of fused kernels where there are any, else of single ops."""
    records: Iterable[tuple[str, float]] = [(group.bound, group.time_us) for group in obj.groups]
    if not obj.groups:
        records = [(op.bound, op.time_us) for op in obj.ops]
    sums = {bound: math.fsum(time for name, time in records if name == bound) for bound in BOUNDS}
    total = math.fsum(sums.values())
    return [BoundShare(bound, time, _ratio(time, total)) for bound, time in sums.items() if time > 0]


def misaligned(ops: Sequence[Op]) -> list[MisalignedRow]:
    """Matmuls that the analysis found misaligned, by M, N, K and line, slowest first."""
    rows: dict[tuple[object, ...], list[Op]] = {}
    for op in ops:
        if op.aligned is False:
            key = (op.target, op.phase, op.mnk, op.dtype, op.file, op.line, general(op.module))
            rows.setdefault(key, []).append(op)
    ranked = [
        MisalignedRow(
            op=same[0],
            module=_common_path([op.module for op in same]),
            count=len(same),
            time_us=math.fsum(op.time_us for op in same),
        )
        for same in rows.values()
    ]
    return sorted(ranked, key=lambda row: -row.time_us)


def offending(op: Op) -> list[tuple[str, int]]:
    """The dims of a misaligned matmul that are no multiple of what its dtype needs, as `("N", 50257)`."""
    if op.aligned is not False or op.mnk is None:
        return []
    needed = multiples(op.dtype)[0]
    return [(name, size) for name, size in zip("MNK", op.mnk, strict=True) if size % needed]


def multiples(dtype: str) -> tuple[int, int]:
    """Elements a matmul dim should be a multiple of: (to use Tensor Cores, to use them best). bfloat16: (8, 64)."""
    match = _BITS.search(dtype)
    bits = int(match[1]) if match and int(match[1]) else 16
    return max(_FITS_BITS // bits, 1), max(_BEST_BITS // bits, 1)


def advice(op: Op) -> str:
    """`N=50257 is no multiple of 8: pad to 50264 or 50304`, for each dim at fault."""
    fits, best = multiples(op.dtype)
    parts = []
    for name, size in offending(op):
        sizes = dict.fromkeys(-(-size // step) * step for step in (fits, best))
        parts.append(f"{name}={size} is no multiple of {fits}: pad to {' or '.join(map(str, sizes))}")
    if parts:
        return "; ".join(parts)
    return f"M, N, K = {', '.join(map(str, op.mnk))}" if op.mnk else "M, N and K are not known"


def rank_groups(groups: Sequence[Group]) -> list[GroupRow]:
    """Fused kernels by predicted time, identical ones as one row; shares are of the sum over all kernels."""
    total = math.fsum(group.time_us for group in groups)
    rows: dict[tuple[object, ...], list[Group]] = {}
    for g in groups:
        rows.setdefault((g.kind, g.phase, g.bound, g.flops, g.bytes_read, g.bytes_written, len(g.ops)), []).append(g)
    ranked = []
    for same in rows.values():
        time = math.fsum(group.time_us for group in same)
        ranked.append(GroupRow(same[0], len(same), time, _ratio(time, total)))
    return sorted(ranked, key=lambda row: -row.time_us)


def pass_rows(report: Report | Analysis) -> list[PassRow]:
    """Passes summed over graphs, in the order in which they first ran."""
    names = dict.fromkeys((p.name, p.stage) for g in report.graphs for p in g.passes)
    rows = []
    for name, stage in names:
        mine = [(g, p) for g in report.graphs for p in g.passes if (p.name, p.stage) == (name, stage)]
        rows.append(
            PassRow(
                name=name,
                stage=stage,
                graphs=len({g.id for g, _ in mine}),
                seconds=math.fsum(p.seconds for _, p in mine),
                applied=sum(len(p.applied) for _, p in mine),
                declined=sum(len(p.declined) for _, p in mine),
                errors=tuple(f"graph {g.id}: {p.error}" for g, p in mine if p.error),
            )
        )
    return rows


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
