"""What the partitioner decided, as the plan that the report shows. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from optpass.backend.memory.replay.replay import StepReplay
from optpass.passes.memory import describe
from optpass.passes.memory.plan import CurvePoint, Ledger, MemoryPlan
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search
from optpass.reporting.model import Site

#: Of generated code the floor is named so many times as large as it is counted, and as the plans that were replayed
#: need more than was counted, so that a budget of that size is mostly met. At the floor of seven models that is between
#: 0.99 and 1.18 times what was counted, and at their default plans no less but for 0.001; of a step of small tensors
#: 1.13 was seen where the default plan needs less. To know it, a plan would have to be lowered.
SAFE = 1.05


@dataclass
class Outcome:
    """What the partitioner decided for one graph, for the report; `filed` is where that says it, `keep` keeps it for
    processes whose caches answer; `together`: once its step was seen, it was planned with others."""

    plan: MemoryPlan | None = None
    replayed: StepReplay | None = None
    replays: int = 0
    filed: Site | None = None
    notes: list[str] = field(default_factory=list)
    keep: Callable[[], None] = lambda: None
    together: bool = False

    def count_replay(self) -> None:
        """A plan is replayed."""
        self.replays += 1


def plan_of(
    search: Search, timeline: Timeline, *, budget_bytes: int, statics: Ledger, own: int, engine: int, at_optimizer: int,
    unconstrained: int | None, generated: bool,
) -> MemoryPlan:  # fmt: skip
    """The plan that `timeline` is.

    Args:
        search: it is one of.
        budget_bytes: of the whole step.
        statics: what is there throughout.
        own: replayed peak above the statics, autograd's own scalars included.
        engine: bytes of these scalars.
        at_optimizer: peak while the optimizer steps, everything counted.
        unconstrained: replayed peak of the default plan above the statics; None where it was not replayed.
        generated: the inner compiler generates what is run, so that the floor is an estimate.
    """
    problem = search.problem
    live, workspace = describe.live_at_peak(search.schedule, timeline)
    ledger = describe.ledger(problem, live, workspace, timeline.peak, statics, timeline.saved)
    ledger = replace(ledger, temporaries=max(0, ledger.temporaries - max(0, timeline.peak - own)))
    step = sum(o.seconds for o in problem.operations if o.forward or o.backward)
    start = search.schedule.run(search.start)
    base = start.recomputed_s
    top = search.unconstrained if unconstrained is None else unconstrained
    wrong = max(1.0, top / max(search.unconstrained, 1), own / max(timeline.peak, 1))
    floor = int(search.least * wrong * SAFE) + engine if generated else search.least + engine
    return MemoryPlan(
        budget_bytes=budget_bytes,
        predicted_peak_bytes=max(statics.total + own, at_optimizer),
        floor_bytes=max(statics.total + min(floor, own), at_optimizer),
        floor_estimated=generated,
        unconstrained_bytes=max(statics.total + engine + top, at_optimizer),
        ledger=ledger,
        saved=describe.saved_tensors(problem, timeline),
        recomputed=describe.recomputed_tensors(search.schedule, timeline, start),
        recompute_seconds=max(0.0, timeline.recomputed_s - base),
        step_seconds=step + base,
        curve=_curve(search, step, statics.total),
        outputs_bytes=sum(problem.storages[s].bytes for s in problem.forward_outputs),
        offloaded=describe.offloaded_tensors(problem, timeline),
        transfer_seconds=sum(item.transfer_s for item in timeline.offloaded),
    )


def _curve(search: Search, step: float, statics: int) -> tuple[CurvePoint, ...]:
    most, curve = 1.0, []
    for point in search.way.points:
        most = max(most, 1.0 + point.seconds / step if step > 0 else 1.0)
        curve.append(CurvePoint(statics + point.peak, most))
    return tuple(curve)
