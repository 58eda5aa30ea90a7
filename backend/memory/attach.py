"""Giving one compile its memory budget: the partitioner, its part of the cache identity, its words in the report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from optpass.backend import compat
from optpass.backend.memory.leaves import Share
from optpass.backend.memory.partition import BudgetPartitioner
from optpass.backend.memory.step import StepTensors, budget_of
from optpass.backend.memory.together import relief
from optpass.options import Options
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory.plan import MemoryPlan, Recomputed
from optpass.reporting.model import PassRecord, Site
from optpass.units import format_bytes

#: Sites of recomputed tensors in the report, the largest.
MAX_SITES = 200


def partitioner_of(
    gm: fx.GraphModule,
    tensors: StepTensors,
    options: Options,
    device: Callable[[], DeviceSpec],
    inner: str | Callable[..., Any],
    *,
    gradients: bool,
    share: Share | None = None,
) -> tuple[BudgetPartitioner | None, str]:
    """The partitioner for a graph's budget, and what to warn of.

    Args:
        gm: Dynamo graph.
        tensors: what it is compiled with.
        inner: who compiles it: 'inductor' and 'aot_eager' let us partition.
        gradients, share: as for `budget_of`.

    Raises:
        ConfigError: the budget or the optimizer cannot be used as given.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    more = reason is not None and bool(getattr(reason, "graph_break", True))
    budget = budget_of(options, device, tensors, more_follow=more, gradients=gradients, share=share)
    if budget is None:
        return None, ""
    if inner not in ("inductor", "aot_eager"):
        name = inner if isinstance(inner, str) else "a callable"
        return None, f"the option 'memory_budget' has no effect with inner={name!r}: it decides what to save itself"
    if options.inductor.get("custom_partitioner_fn") is not None:
        return None, "the option 'memory_budget' has no effect beside a custom_partitioner_fn of yours"
    problem = compat.budget_problem(inductor=inner == "inductor")
    if problem is not None:
        return None, f"the option 'memory_budget' has no effect with this version of torch: {problem}"
    partitioner = BudgetPartitioner(budget, device, "inductor" if inner == "inductor" else "graph")
    partitioner.relief = relief
    return partitioner, ""


def identity_of(uuid: str, partitioner: BudgetPartitioner | None) -> str:
    """The cache identity `uuid`, with what a plan depends on beside the options: what the step holds otherwise."""
    if partitioner is None:
        return uuid
    return hashlib.sha256(f"{uuid} {partitioner.budget!r}".encode()).hexdigest()


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
    summary = Site(kind="memory budget", reason=_summary(plan, partitioner.outcome.notes), cost=figures)
    unchanged = not plan.recomputed  # a plan that holds less for others' sake may have a larger peak itself
    record = PassRecord(name="memory", stage="joint", seconds=seconds)
    if unchanged:
        record.declined.append(summary)
    else:
        record.applied.append(summary)
        record.applied.extend(_site(item) for item in plan.recomputed[:MAX_SITES])
    return record


def _summary(plan: MemoryPlan, notes: Sequence[str]) -> str:
    peak, budget = format_bytes(plan.predicted_peak_bytes), format_bytes(plan.budget_bytes or 0)
    said = (
        f"predicted peak {peak} of a budget of {budget}; the smallest peak of any plan is "
        f"{format_bytes(plan.floor_bytes)}; recomputing costs {100 * (plan.slowdown - 1):.1f}% of the step"
    )
    return "; ".join((said, *notes))


def _site(item: Recomputed) -> Site:
    return Site(
        kind="recompute",
        file=item.file,
        line=item.line,
        module=item.module,
        node=item.node,
        reason=f"computed again in the backward ({item.copies} x {item.seconds * 1e6:.0f} us), so that "
        f"{format_bytes(item.bytes)} need not be kept",
        before=f"saved {item.op} {item.shape}",
        after="recomputed",
        cost={"bytes": float(item.bytes), "seconds": item.seconds, "copies": float(item.copies)},
    )
