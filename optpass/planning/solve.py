"""Plans for the graphs of one step: each graph's search, and what a budget for the whole step leaves to each of them.

A step of several graphs (graph breaks) runs their forwards in order and their backwards in reverse, so that a graph
computes while what the earlier ones saved is held. Nothing here knows models, devices or reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from optpass.backend.capture import Joint
from optpass.backend.memory.replay.graph_values import hint
from optpass.passes.memory import describe, redraw
from optpass.passes.memory.plan import CurvePoint, Ledger, MemoryPlan, Tensor
from optpass.passes.memory.problem import Price, Problem, build
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search

#: Halvings of the interval between floor and unconstrained when a budget is divided among several graphs.
_HALVINGS = 20
T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True)
class Chosen:
    """One graph at one point of its way: the timeline, and bytes above the statics."""

    timeline: Timeline
    peak: int
    saved: int
    outputs: int
    gradients: int


class GraphWays:
    """One graph of the step, and every plan that the search found for it.

    Args:
        problem: the graph.
        progress: told the peak after each step of the search.
    """

    def __init__(self, problem: Problem, progress: Callable[[int], None] | None = None) -> None:
        self.problem = problem
        self.search = Search(problem, progress)
        self.sizes = [s.bytes for s in problem.storages]
        self.outputs = sum(self.sizes[s] for s in problem.forward_outputs)
        self.gradients = sum(self.sizes[s] for s in problem.backward_outputs)
        #: The unconstrained plan.
        self.base = self.search.schedule.run(self.search.start)
        self.base_s = self.base.recomputed_s
        own = sum(o.seconds for o in problem.operations if o.forward or o.backward)
        #: Predicted seconds of the unconstrained step.
        self.step_s = own + self.base_s
        #: FLOPs of forward and backward without anything computed twice.
        self.flops = sum(o.flops for o in problem.operations if o.forward or o.backward)

    def at_most(self, peak: int) -> Chosen | None:
        """The first plan on the way whose peak is at most `peak` bytes; None below the floor."""
        found = self.search.at_most(peak)
        if found is None:
            return None
        timeline = found[1]
        held = set(self.problem.forward_outputs)
        saved = sum(self.sizes[s] for s in timeline.saved if s not in held)
        return Chosen(timeline, int(timeline.peak), saved, self.outputs, self.gradients)


def problem_of(joint: Joint, price: Callable[[fx.Node], Price], *, unit: int, divide_gradients: int = 1) -> Problem:
    """The problem of a captured joint graph.

    Args:
        unit: bytes that the allocator rounds up to.
        divide_gradients: devices among which a gradient is divided as soon as it is made.
    """
    forward, backward = joint.outputs()
    cost = lambda node: Price() if redraw.is_state(node) else price(node)  # noqa: E731  # it is in what runs from the state
    problem = build(
        joint.graph, forward, backward, saved=joint.saved, price=cost, hint=_concrete, granularity=unit
    )  # fmt: skip
    if divide_gradients > 1:
        for s in problem.backward_outputs:
            problem.storages[s].bytes = -(-problem.storages[s].bytes // divide_gradients)
    return problem


def _concrete(value: object) -> int:
    return int(hint(value))


@dataclass(frozen=True)
class Fixed:
    """What no plan changes.

    Attributes:
        statics: there throughout forward and backward.
        at_optimizer: the ledger while the optimizer steps.
        gathered: bytes of a gathered layer, beside every operation.
    """

    statics: Ledger
    at_optimizer: Ledger
    gathered: int = 0

    @property
    def throughout(self) -> int:
        """Bytes beside what the graphs make."""
        return self.statics.total + self.gathered


class StepPlanner:
    """Plans for a whole step.

    Args:
        graphs: in the order in which the forward runs them.
        fixed: what no plan changes.
    """

    def __init__(self, graphs: Sequence[GraphWays], fixed: Fixed) -> None:
        if not graphs:
            raise ValueError("a step without a graph has nothing to plan")
        self.graphs, self.fixed = list(graphs), fixed
        self.step_s = sum(g.step_s for g in self.graphs)
        self.flops = sum(g.flops for g in self.graphs)
        self._loosest = self._at(1.0)
        self._tightest = self._at(0.0)
        self.unconstrained = self._total(self._loosest)
        self.floor = min(self._total(self._tightest), self.unconstrained)
        #: The smallest peak of forward and backward alone.
        self.graph_floor = max(self._peaks(self._tightest))

    # ---- choosing -----------------------------------------------------------------------------------------------

    def plan(self, budget: int | None) -> MemoryPlan | None:
        """The fastest plan within `budget` bytes, everything counted; the unconstrained one for None; None below the
        floor."""
        chosen = self.choose(budget)
        return None if chosen is None else self._described(chosen, budget)

    def floor_plan(self) -> MemoryPlan:
        """The plan of the smallest peak."""
        return self._described(self._tightest, None)

    def choose(self, budget: int | None) -> list[Chosen] | None:
        """A point on each graph's way for the budget; None where there is none."""
        if budget is None or self.unconstrained <= budget:
            return self._loosest
        if self.floor > budget:
            return None
        if len(self.graphs) == 1:
            one = self.graphs[0].at_most(budget - self.fixed.throughout)
            return None if one is None else [one]
        low, high, best = 0.0, 1.0, self._tightest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            trial = self._at(middle)
            if self._total(trial) <= budget:
                low, best = middle, trial
            else:
                high = middle
        return best

    def _at(self, share: float) -> list[Chosen]:
        """Every graph at the same share of its way, 1 for unconstrained and 0 for its floor."""
        found = []
        for graph in self.graphs:
            low, high = graph.search.floor, graph.search.unconstrained
            chosen = graph.at_most(int(low + (high - low) * share))
            assert chosen is not None  # never below the graph's own floor
            found.append(chosen)
        return found

    def _peaks(self, chosen: Sequence[Chosen]) -> list[int]:
        """The peak while each graph runs, everything counted."""
        peaks = []
        for i, one in enumerate(chosen):
            before = sum(c.saved + c.outputs for c in chosen[:i])
            after = sum(c.gradients for c in chosen[i + 1 :])
            peaks.append(self.fixed.throughout + before + after + one.peak)
        return peaks

    def _total(self, chosen: Sequence[Chosen]) -> int:
        return max(*self._peaks(chosen), self.optimizer_total)

    @property
    def optimizer_total(self) -> int:
        """Bytes while the optimizer steps."""
        return self.fixed.at_optimizer.total + sum(g.outputs for g in self.graphs)

    # ---- describing ---------------------------------------------------------------------------------------------

    def _described(self, chosen: Sequence[Chosen], budget: int | None) -> MemoryPlan:
        total = self._total(chosen)
        pairs = list(zip(self.graphs, chosen, strict=True))
        return MemoryPlan(
            budget_bytes=budget,
            predicted_peak_bytes=total,
            floor_bytes=self.floor,
            unconstrained_bytes=self.unconstrained,
            ledger=self.ledger_of(chosen),
            saved=_sorted(t for g, c in pairs for t in describe.saved_tensors(g.problem, c.timeline)),
            recomputed=_sorted(
                t for g, c in pairs for t in describe.recomputed_tensors(g.search.schedule, c.timeline, g.base)
            ),
            recompute_seconds=max(self._again(chosen), 0.0),
            step_seconds=self.step_s,
            curve=self.curve(),
        )

    def recompute_seconds(self, budget: int) -> float:
        """Seconds of recomputation of the fastest plan within `budget` bytes; infinite below the floor."""
        chosen = self.choose(budget)
        return float("inf") if chosen is None else max(self._again(chosen), 0.0)

    def _again(self, chosen: Sequence[Chosen]) -> float:
        """Seconds of recomputation beyond the unconstrained plan's."""
        return sum(c.timeline.recomputed_s - g.base_s for c, g in zip(chosen, self.graphs, strict=True))

    def ledger_of(self, chosen: Sequence[Chosen]) -> Ledger:
        """Where the bytes of the peak are."""
        peaks = self._peaks(chosen)
        if self.optimizer_total > max(peaks):
            outputs = sum(g.outputs for g in self.graphs)
            ledger = self.fixed.at_optimizer
            return replace(ledger, activations=ledger.activations + outputs)
        at = max(range(len(peaks)), key=lambda i: peaks[i])
        graph, one = self.graphs[at], chosen[at]
        live, workspace = describe.live_at_peak(graph.search.schedule, one.timeline)
        own = describe.ledger(graph.problem, live, workspace, one.peak, self.fixed.statics, one.timeline.saved)
        before = sum(c.saved + c.outputs for c in chosen[:at])
        after = sum(c.gradients for c in chosen[at + 1 :])
        return replace(
            own,
            activations=own.activations + before,
            gradients=own.gradients + after,
            temporaries=own.temporaries + self.fixed.gathered,
        )

    def largest_at_floor(self) -> list[Tensor]:
        """Tensors that are live at the smallest peak, largest first. The statics are in no graph and not among them,
        so that there are none where the optimizer's step is the peak."""
        peaks = self._peaks(self._tightest)
        if self.optimizer_total > max(peaks):
            return []
        at = max(range(len(peaks)), key=lambda i: peaks[i])
        graph, one = self.graphs[at], self._tightest[at]
        live, _ = describe.live_at_peak(graph.search.schedule, one.timeline)
        return [describe.tensor_of(graph.problem.storages[s]) for s in live]

    def curve(self) -> tuple[CurvePoint, ...]:
        """Peak and slowdown of the fastest plan at each peak, by falling peak; the slowdown never falls."""
        points: list[CurvePoint] = []
        if len(self.graphs) == 1:
            raw = [(self.fixed.throughout + peak, seconds) for peak, seconds in self.graphs[0].search.frontier()]
        else:
            shares = [self._at(1 - i / _HALVINGS) for i in range(_HALVINGS + 1)]
            raw = [(max(self._peaks(chosen)), self._again(chosen)) for chosen in shares]
        most, least = 1.0, self.optimizer_total
        for peak, seconds in raw:
            most = max(most, 1.0 + seconds / self.step_s if self.step_s > 0 else 1.0)
            total = max(int(peak), least)
            if not points or total < points[-1].peak_bytes:
                points.append(CurvePoint(total, most))
        return tuple(points)


def _sorted(tensors: Iterable[T]) -> tuple[T, ...]:
    return tuple(sorted(tensors, key=lambda t: (-t.bytes, t.node)))
