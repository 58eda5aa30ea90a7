"""A plan as a compile of the step would choose it: what its graphs need is replayed on fake tensors, not counted.

The search counts storages over the joint graph. Of what Inductor generates that is a model, and a step that fits as it
is written runs as torch's own partitioner splits it, whatever the search starts from. So where the tensors that stand
for the device's are of its kind, a plan is asked of the backend's partitioner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optpass.backend import compat
from optpass.backend.capture import Joint
from optpass.backend.inner import own_patches
from optpass.backend.memory.budget import Budget
from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.errors import BudgetInfeasibleError
from optpass.passes.memory.plan import CurvePoint, MemoryPlan
from optpass.planning.request import Request
from optpass.planning.solve import StepPlanner
from optpass.planning.step import StepState

#: Joint graphs of more nodes are counted alone. For one budget several plans are replayed: Inductor lowers each of
#: them, which takes long; those that are run as they stand take far less.
MOST_NODES = {"inductor": 1_500, "aot_eager": 10_000}
#: A budget that every step fits.
_UNLIMITED = 1 << 62


class Replayed:
    """Plans of a step of one graph.

    Args:
        request: what is asked for.
        state: what is there whatever the plan.
        joint: the graph, in the form that plans are made for.
        planner: its plans as they are counted.

    Attributes:
        floor: the smallest peak; under Inductor that is counted, until a budget is below it.
    """

    def __init__(self, request: Request, state: StepState, joint: Joint, planner: StepPlanner) -> None:
        self.request, self.state, self.joint, self.planner = request, state, joint, planner
        self.fused = request.options.inner == "inductor"
        self.floor = planner.floor
        self._loosest: MemoryPlan | None = None

    def plan(self, budget: int | None) -> MemoryPlan | None:
        """The fastest plan within `budget` bytes, everything counted; the unconstrained one for None; None below the
        floor."""
        if budget is None or not self.fused:
            self._tell("as it is written")
            self._loosest = loosest = self._planned(_UNLIMITED)
            if not self.fused:
                self.floor = self._least(loosest)
            if budget is None or loosest.predicted_peak_bytes <= budget:
                return self._described(loosest, budget)
            if self.floor > budget:
                return None
        self._tell("within the budget")
        try:
            return self._described(self._planned(budget), budget)
        except BudgetInfeasibleError as error:
            self.floor = error.floor_bytes
            return None

    def _least(self, loosest: MemoryPlan) -> int:
        self._tell("the smallest")
        try:
            return self._planned(self.state.statics().total + 1, least=True).predicted_peak_bytes
        except BudgetInfeasibleError as error:
            return min(error.floor_bytes, loosest.predicted_peak_bytes)

    def _planned(self, size: int, *, least: bool = False) -> MemoryPlan:
        request, state, live = self.request, self.state, self.joint.live
        assert live is not None  # else it is not replayed
        itemsize = max((p.dtype.itemsize for p in state.trained), default=4)
        budget = Budget(
            size, state.statics(), state.at_optimizer(0).total, optimizer=state.optimizer.name,
            trained_itemsize=itemsize, where=request.where,
        )  # fmt: skip
        patches = own_patches(request.options, None) if self.fused else None
        partitioner = BudgetPartitioner(budget, lambda: request.device, "inductor" if self.fused else "graph", patches)
        partitioner.least = least
        return partitioner.planned(live.module, live.halves, live.given)

    def _described(self, plan: MemoryPlan, budget: int | None) -> MemoryPlan:
        peak = plan.predicted_peak_bytes
        top = max(peak, (self._loosest or plan).unconstrained_bytes)
        self.floor = min(peak, plan.floor_bytes if self.fused else self.floor)
        ledger = plan.ledger
        if plan.predicted_peak_bytes <= self.state.at_optimizer(plan.outputs_bytes).total:
            ledger = self.state.at_optimizer(plan.outputs_bytes)
        more = plan.predicted_peak_bytes - ledger.total
        return replace(
            plan,
            budget_bytes=budget,
            floor_bytes=self.floor,
            floor_estimated=self.fused,
            unconstrained_bytes=top,
            ledger=replace(ledger, temporaries=ledger.temporaries + more) if ledger.temporaries + more >= 0 else ledger,
            curve=_between(self.planner.curve(), self.floor, top),
        )

    def _tell(self, what: str) -> None:
        self.request.progress(None, f"replaying plans: {what}")


def replayable(request: Request, joints: Sequence[Joint]) -> bool:
    """Whether a compile's own plan of a step of these graphs can be had here, in little time."""
    most = MOST_NODES.get(str(request.options.inner))
    if request.device.kind != "cpu" or most is None or len(joints) != 1 or joints[0].live is None:
        return False
    if request.shard is not None and request.shard.world_size > 1:
        return False
    problem = compat.budget_problem(inductor=request.options.inner == "inductor")
    return problem is None and len(joints[0].graph.nodes) <= most


def _between(curve: Sequence[CurvePoint], floor: int, top: int) -> tuple[CurvePoint, ...]:
    """A curve whose ends are known, its peaks as far between them as they are counted."""
    high, low = curve[0].peak_bytes, curve[-1].peak_bytes
    if high == low or floor >= top:
        return (replace(curve[0], peak_bytes=top),)
    part = (top - floor) / (high - low)
    return tuple(replace(p, peak_bytes=top - round((high - p.peak_bytes) * part)) for p in curve)
