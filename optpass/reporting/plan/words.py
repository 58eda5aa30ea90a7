"""What the views say of a plan, worked out once: identical tensors of repeated layers as one row, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optpass.reporting.model import DeviceRecord
from optpass.reporting.plan.curve import evenly
from optpass.reporting.plan.model import PlannedTensor, PlanReport, RecomputedTensor
from optpass.reporting.summary import general
from optpass.reporting.text import device_line, percent
from optpass.units import format_bytes, format_seconds

#: Peaks of the curve that are shown as rows.
_CURVE_ROWS = 8


@dataclass(frozen=True)
class TensorRow:
    """Tensors of the same line, operator and size, as in repeated layers.

    Attributes:
        first: one of them.
        module: their module path, numbers that differ as `*`.
        count: how many.
        bytes: of all of them.
        time_us: of making all of them once (saved), or as often as the plan does (recomputed).
    """

    first: PlannedTensor
    module: str
    count: int
    bytes: int
    time_us: float

    @property
    def op(self) -> str:
        """`aten._softmax.default` as `softmax`."""
        return short_op(self.first.op)

    @property
    def place(self) -> str:
        """`model.py:41`; empty where the file is not known."""
        first = self.first
        if not first.file:
            return ""
        name = Path(first.file).name
        return f"{name}:{first.line}" if first.line is not None else name


def short_op(op: str) -> str:
    """The operator's own name, without its library, its overload and the underscores of an internal one."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims", "prim", "inductor", "optpass") else parts[-1]
    return name.strip("_") or op or "tensor"


def rows(tensors: Sequence[PlannedTensor]) -> list[TensorRow]:
    """Every tensor, those of repeated layers as one row, most bytes first."""
    found: dict[tuple[object, ...], list[PlannedTensor]] = {}
    for tensor in tensors:
        key = (tensor.op, tensor.bytes, tensor.shape, tensor.file, tensor.line, general(tensor.module))
        found.setdefault(key, []).append(tensor)
    made = [
        TensorRow(
            first=same[0],
            module=_common(same),
            count=len(same),
            bytes=sum(t.bytes for t in same),
            time_us=sum(t.time_us * (t.copies if isinstance(t, RecomputedTensor) else 1) for t in same),
        )
        for same in found.values()
    ]
    return sorted(made, key=lambda row: (-row.bytes, row.module, row.first.tensor))


def _common(same: Sequence[PlannedTensor]) -> str:
    modules = {t.module for t in same}
    return same[0].module or "" if len(modules) == 1 else general(same[0].module)


def sentence(row: TensorRow, plan: PlanReport) -> str:
    """`blocks.*.attn softmax, model.py:41, 1.2 GiB saved x 12; making it again frees 14.4 GiB and costs 2.1% ...`."""
    name = " ".join(part for part in (row.module, row.op) if part)
    where = f"{name}, {row.place}" if row.place else name
    times = f" x {row.count}" if row.count > 1 else ""
    share = _share(row.time_us, plan.overhead.step_us)
    it = "them" if row.count > 1 else "it"
    if isinstance(row.first, RecomputedTensor):
        most = max(row.first.copies, 1)
        often = f", each {most} times" if most > 1 and row.count > 1 else f", {most} times" if most > 1 else ""
        return (
            f"{where}, {format_bytes(row.first.bytes)} recomputed{times}{often}; this frees {format_bytes(row.bytes)} "
            f"and costs {share}"
        )
    return (
        f"{where}, {format_bytes(row.first.bytes)} saved{times}; recomputing {it} frees {format_bytes(row.bytes)} "
        f"and costs {share}"
    )


def _share(time_us: float, step_us: float) -> str:
    return f"{percent(time_us / step_us)} of the step" if step_us > 0 else format_seconds(time_us * 1e-6)


def title(plan: PlanReport) -> str:
    """The target, and what its step was planned with."""
    return plan.target


def subtitle(plan: PlanReport) -> str:
    """`training step, bfloat16, 8,030,261,248 parameters, adamw, int64[1, 8192]`."""
    batch = ""
    if plan.batch.size is not None:
        batch = f"micro-batch {plan.batch.size}" + (", the largest that fits" if plan.batch.searched else "")
    shard = f"{plan.shard.kind} over {plan.shard.world_size} devices" if plan.shard is not None else ""
    accumulated = f"{plan.accumulation} micro-batches a step" if plan.accumulation > 1 else ""
    optimizer = f"optimizer {plan.optimizer}"
    count = f"{plan.parameter_count:,} parameters" if plan.parameter_count else ""
    facts = ("training step", plan.dtype, count, optimizer, batch, accumulated, plan.inputs, shard)
    return ", ".join(fact for fact in facts if fact)


def device(record: DeviceRecord) -> str:
    """The device, and its memory where that is known."""
    memory = f"; {format_bytes(record.memory_bytes)} of memory" if record.memory_bytes else ""
    return device_line(record) + memory


def verdict(plan: PlanReport) -> str:
    """Whether the budget is met, and at what cost, in one sentence."""
    peak, slowdown = format_bytes(plan.predicted_peak_bytes), plan.overhead.predicted_slowdown
    cost = "nothing is recomputed" if not plan.recomputed else f"a step takes {percent(slowdown - 1)} longer"
    if plan.budget_bytes is None:
        return f"No budget: the peak is {peak}; the smallest that a plan reaches is {format_bytes(plan.floor_bytes)}."
    used = f"{peak} of {format_bytes(plan.budget_bytes)}"
    return f"It fits: the peak is {used} ({percent(plan.predicted_peak_bytes / plan.budget_bytes)}), and {cost}."


def ledger_facts(plan: PlanReport) -> list[tuple[str, str]]:
    """Each entry of the ledger that is not empty with its share, and the sum."""
    total = max(plan.predicted_peak_bytes, 1)
    entries = [(name, getattr(plan.ledger, name)) for name in type(plan.ledger).model_fields]
    facts = [(name, f"{format_bytes(size)}, {percent(size / total)}") for name, size in entries if size]
    return [*facts, ("peak", format_bytes(plan.predicted_peak_bytes))]


def range_facts(plan: PlanReport) -> list[tuple[str, str]]:
    """Floor, unconstrained peak, the optimizer's step, and what the plan costs."""
    overhead = plan.overhead
    facts = [
        ("without a budget", format_bytes(plan.unconstrained_bytes)),
        ("smallest peak of any plan", format_bytes(plan.floor_bytes)),
    ]
    if plan.optimizer_step_bytes:
        facts.append(("while the optimizer steps", format_bytes(plan.optimizer_step_bytes)))
    if overhead.step_us:
        facts.append(("step, forward and backward", f"{format_seconds(overhead.step_us * 1e-6)} predicted"))
    if plan.recomputed:
        flops = f"{percent(overhead.recompute_flops_fraction)} more FLOPs"
        facts.append(("recomputing", f"{format_seconds(overhead.recompute_us * 1e-6)}, {flops}"))
    if plan.shard is not None and plan.shard.gathered_bytes:
        size = format_bytes(plan.shard.gathered_bytes + plan.shard.gradient_bytes)
        facts.append(("largest layer, gathered", f"{plan.shard.layer or 'the model'}, {size} with its gradients"))
    if plan.batch.tried:
        tried = ", ".join(f"{size}: {format_bytes(floor)}" for size, floor in plan.batch.tried)
        facts.append(("smallest peaks by micro-batch", tried))
    return facts


def offload_sentence(plan: PlanReport) -> str:
    """What having saved tensors in host memory does, in a run with a budget; empty where the link is not known."""
    record = plan.offload
    if record is None:
        return ""
    if not record.tensors:
        return "Offloading to the host is no gain: no saved tensor is idle for as long as its two transfers take."
    frees, moved = format_bytes(record.frees_bytes), format_seconds(record.transfer_us * 1e-6)
    hidden = format_seconds(record.hidden_us * 1e-6)
    frees = f"frees {frees}" if record.runs else f"would free {frees}"
    text = f"Offloading {len(record.tensors)} saved tensors to the host {frees}: {moved} on the link"
    text += f", {hidden} of it behind computing"
    if record.runs:
        saved = format_seconds(record.replaces_us * 1e-6)
        return f"{text}; a run with this budget does that, and spares {saved} of the recomputing above."
    if not record.replaces_us:
        return f"{text}; nothing has to be recomputed, so it is not needed."
    saved = format_seconds(record.replaces_us * 1e-6)
    return f"{text}; it {'pays: it' if record.pays else 'does not pay: it'} would replace {saved} of recomputing."


def curve_rows(plan: PlanReport) -> list[tuple[str, str]]:
    """Some points of the curve, from no recomputing to the floor: peak and slowdown."""
    return [
        (format_bytes(point.peak_bytes), f"{percent(max(point.slowdown - 1, 0.0))} longer")
        for point in evenly(plan.pareto, _CURVE_ROWS)
    ]
