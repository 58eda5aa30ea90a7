"""What was planned for a graph, as the report says it, and said again when its step has been seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.passes.memory.plan import MemoryPlan, Recomputed, Tensor
from optpass.reporting import store
from optpass.reporting.model import PassRecord, Site
from optpass.units import format_bytes, format_seconds

#: Sites of recomputed tensors in the report, the largest.
MAX_SITES = 200
#: How a note ends that says what larger sizes need.
GROWN = "at the largest sizes that it was called with, larger than those it is predicted for"


def record_of(partitioner: BudgetPartitioner, seconds: float = 0.0) -> PassRecord | None:
    """What was decided, for the report; None where the caches answered and nothing was."""
    plan = partitioner.outcome.plan
    if plan is None:
        return None
    figures = {
        "budget_bytes": float(plan.budget_bytes or 0),
        "predicted_peak_bytes": float(plan.predicted_peak_bytes),
        "floor_bytes": float(plan.floor_bytes),
        "unconstrained_bytes": float(plan.unconstrained_bytes),
        "predicted_slowdown": plan.slowdown,
    }
    if plan.offloaded:
        figures |= {"offloaded_bytes": float(_moved(plan)), "transfer_seconds": plan.transfer_seconds}
    summary = Site(kind="memory budget", reason=_summary(plan, partitioner.outcome.notes), cost=figures)
    partitioner.outcome.filed = summary
    unchanged = (
        not plan.recomputed and not plan.offloaded
    )  # a plan that holds less for others' sake may have a larger peak itself
    record = PassRecord(name="memory", stage="joint", seconds=seconds)
    if unchanged:
        record.declined.append(summary)
    else:
        record.applied.append(summary)
        record.applied.extend(_site(item) for item in plan.recomputed[:MAX_SITES])
        record.applied.extend(_site_of_offload(item) for item in plan.offloaded[:MAX_SITES])
    return record


def predict_anew(partitioner: BudgetPartitioner, peak: int, floor: int, top: int) -> None:
    """The step was seen: the plan in force is predicted to need `peak` bytes, everything counted, the step `floor` with
    the plans that need least, and `top` where nothing is computed again."""
    outcome = partitioner.outcome
    if outcome.plan is None:
        return
    plan = replace(outcome.plan, predicted_peak_bytes=peak, floor_bytes=floor, unconstrained_bytes=max(peak, top))
    if plan == outcome.plan:
        return
    outcome.plan = plan
    outcome.keep()
    if outcome.filed is not None:
        with store.current().lock:
            outcome.filed.cost |= {
                "predicted_peak_bytes": float(peak),
                "floor_bytes": float(floor),
                "unconstrained_bytes": float(plan.unconstrained_bytes),
            }
            outcome.filed.reason = _summary(plan, outcome.notes)


def grown(partitioner: BudgetPartitioner, peak: int) -> None:
    """The plan in force was run at larger sizes than it was made for, at which it needs at most `peak` bytes."""
    for note in [note for note in partitioner.outcome.notes if note.endswith(GROWN)]:
        partitioner.outcome.notes.remove(note)
    add_note(partitioner, f"up to {format_bytes(peak)} {GROWN}")


def add_note(partitioner: BudgetPartitioner, note: str) -> None:
    """The step was seen: say `note` of the plan in force, once."""
    outcome = partitioner.outcome
    if outcome.plan is None or note in outcome.notes:
        return
    outcome.notes.append(note)
    if outcome.filed is not None:
        with store.current().lock:
            outcome.filed.reason = _summary(outcome.plan, outcome.notes)


def _summary(plan: MemoryPlan, notes: Sequence[str]) -> str:
    peak, budget = format_bytes(plan.predicted_peak_bytes), format_bytes(plan.budget_bytes or 0)
    about = "about " if plan.floor_estimated else ""
    said = (
        f"predicted peak {peak} of a budget of {budget}; the smallest peak of any plan is {about}"
        f"{format_bytes(plan.floor_bytes)}; recomputing costs {100 * (plan.slowdown - 1):.1f}% of the step"
    )
    if plan.offloaded:
        number, size = len(plan.offloaded), format_bytes(_moved(plan))
        said += (
            f"; {number} saved tensor{'s are' if number > 1 else ' is'} in host memory between forward and backward "
            f"({size}), copied behind the computing in {format_seconds(plan.transfer_seconds)}"
        )
    return "; ".join((said, *notes))


def _moved(plan: MemoryPlan) -> int:
    return sum(item.bytes for item in plan.offloaded)


def _site_of_offload(item: Tensor) -> Site:
    reason = f"in host memory between forward and backward, so that {format_bytes(item.bytes)} need not be kept on "
    return _site_of(item, "offload", f"{reason}the device", "offloaded")


def _site(item: Recomputed) -> Site:
    reason = f"computed again in the backward ({item.copies} x {item.seconds * 1e6:.0f} us), so that "
    more = {"seconds": item.seconds, "copies": float(item.copies)}
    return _site_of(item, "recompute", f"{reason}{format_bytes(item.bytes)} need not be kept", "recomputed", more)


def _site_of(item: Tensor, kind: str, reason: str, after: str, more: Mapping[str, float] | None = None) -> Site:
    return Site(
        kind=kind, file=item.file, line=item.line, module=item.module, node=item.node, reason=reason,
        before=f"saved {item.op} {item.shape}", after=after, cost={"bytes": float(item.bytes), **(more or {})},
    )  # fmt: skip
