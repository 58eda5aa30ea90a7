"""From a plan to its record, `optpass.plan/1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from optpass.backend.memory.partition.offloading import Walk, movable
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory import describe, offload
from optpass.passes.memory.offload import Host, hidden_offloads
from optpass.passes.memory.plan import MemoryPlan, Recomputed, Tensor
from optpass.passes.memory.search.timeline import Timeline
from optpass.passes.roofline.price import device_record
from optpass.planning.solve import Chosen, StepPlanner
from optpass.reporting.plan.curve import evenly
from optpass.reporting.plan.model import (
    LedgerRecord,
    OffloadedTensor,
    OffloadRecord,
    Overhead,
    ParetoPoint,
    PlannedTensor,
    PlanReport,
    RecomputedTensor,
)

#: Points of the curve that the record keeps.
_MOST_POINTS = 200

T = TypeVar("T", bound=Tensor)
_Costs = dict[str, tuple[float, float]]


def plan_record(
    target: str, device: DeviceSpec, planner: StepPlanner, chosen: Sequence[Chosen], plan: MemoryPlan
) -> PlanReport:
    """The record of `plan`, which `planner` made of `chosen`. The caller adds what it knows of model and batch."""
    costs = _costs(planner)
    if device.kind != "cpu":
        plan = replace(plan, saved=_elsewhere(plan.saved), recomputed=_elsewhere(plan.recomputed))
    return PlanReport(
        target=target,
        device=device_record(device),
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        floor_bytes=plan.floor_bytes,
        unconstrained_bytes=plan.unconstrained_bytes,
        optimizer_step_bytes=planner.optimizer_total,
        ledger=LedgerRecord(**vars(plan.ledger)),
        saved=[_planned(t, costs) for t in plan.saved],
        recomputed=[_recomputed(t) for t in plan.recomputed if t.bytes],
        overhead=_overhead(planner, plan),
        pareto=evenly([ParetoPoint(peak_bytes=p.peak_bytes, slowdown=p.slowdown) for p in plan.curve], _MOST_POINTS),
        offload=_offload(device, planner, chosen, plan, costs),
    )


def _costs(planner: StepPlanner) -> _Costs:
    """FLOPs and seconds of making each value once, by the node that makes it."""
    return {o.node.name: (o.flops, o.seconds) for graph in planner.graphs for o in graph.problem.operations}


def _elsewhere(tensors: tuple[T, ...]) -> tuple[T, ...]:
    """Under the names of the operators that another device runs. What is planned was traced for the CPU."""
    return tuple(replace(tensor, op=tensor.op.replace("_for_cpu", "")) for tensor in tensors)


def _planned(tensor: Tensor, costs: _Costs) -> PlannedTensor:
    flops, seconds = costs.get(tensor.node, (0.0, 0.0))
    return PlannedTensor(
        tensor=tensor.node, bytes=tensor.bytes, op=tensor.op, shape=tensor.shape, flops=flops, time_us=seconds * 1e6,
        file=tensor.file, line=tensor.line, module=tensor.module,
    )  # fmt: skip


def _recomputed(tensor: Recomputed) -> RecomputedTensor:
    return RecomputedTensor(
        tensor=tensor.node, bytes=tensor.bytes, op=tensor.op, shape=tensor.shape, flops=tensor.flops,
        time_us=tensor.seconds * 1e6, file=tensor.file, line=tensor.line, module=tensor.module, copies=tensor.copies,
    )  # fmt: skip


def _overhead(planner: StepPlanner, plan: MemoryPlan) -> Overhead:
    return Overhead(
        recompute_flops_fraction=plan.recompute_flops / planner.flops if planner.flops else 0.0,
        predicted_slowdown=plan.slowdown,
        recompute_us=plan.recompute_seconds * 1e6,
        step_us=plan.step_seconds * 1e6,
    )


def _offload(
    device: DeviceSpec, planner: StepPlanner, chosen: Sequence[Chosen], plan: MemoryPlan, costs: _Costs
) -> OffloadRecord | None:
    """What saved tensors in host memory do, where the link is known and the step is one graph: those that a run with
    this budget has there, or else all that could be."""
    link = device.pcie_bytes_per_s
    if link is None or device.kind == "cpu" or len(planner.graphs) != 1:
        return None
    graph, one = planner.graphs[0], chosen[0].timeline
    host = Host(link, may=movable(graph.problem.operations[0].node.graph, graph.problem).__contains__)
    taken: Timeline | None = None
    if plan.budget_bytes is not None and plan.recompute_seconds:
        room = plan.budget_bytes - planner.fixed.throughout
        taken = Walk(graph.search, host, device.launch_s).fastest(room, one.recomputed_s)
    schedule = graph.search.schedule
    moved = taken or offload.moved(one, hidden_offloads(schedule, one, host))
    frees, transfer = (sum(getattr(o, name) for o in moved.offloaded) for name in ("bytes", "transfer_s"))
    if taken is not None:
        replaced = one.recomputed_s - taken.recomputed_s
    else:
        replaced = plan.recompute_seconds - planner.recompute_seconds(plan.predicted_peak_bytes + frees)
    seconds = {graph.problem.storages[o.storage].node.name: o.transfer_s for o in moved.offloaded}
    tensors = _elsewhere(describe.offloaded_tensors(graph.problem, moved))
    return OffloadRecord(
        link_bytes_per_s=link,
        frees_bytes=frees,
        transfer_us=transfer * 1e6,
        hidden_us=transfer * 1e6,
        replaces_us=max(replaced, 0.0) * 1e6,
        # Two copies to start for each tensor.
        pays=taken is not None or (bool(tensors) and replaced > 2 * device.launch_s * len(tensors)),
        runs=taken is not None,
        tensors=[
            OffloadedTensor(**_planned(t, costs).model_dump(), transfer_us=seconds[t.node] * 1e6) for t in tensors
        ],
    )
