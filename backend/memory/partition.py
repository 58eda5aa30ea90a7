"""The partitioner of a compile that has a memory budget: default plan where that fits, else the fastest that does.

The search counts storages over the joint graph, which is exact where the graph is run as it stands; what Inductor
generates needs less. So each chosen plan is replayed as the inner compiler would run it, and the search is asked again
with the difference taken into account, a few times at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from optpass.backend import compat, snapshot
from optpass.backend.compat import partition as parts
from optpass.backend.memory.probe import library_workspace
from optpass.backend.memory.replay import Executor, StepReplay, hint, replay_step
from optpass.backend.memory.tail import NO_TAIL, Tail
from optpass.errors import BudgetInfeasibleError
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory import describe
from optpass.passes.memory.emit import rewrite
from optpass.passes.memory.infeasible import explain_infeasible, standard_helps
from optpass.passes.memory.plan import CurvePoint, Ledger, MemoryPlan
from optpass.passes.memory.pricing import node_prices
from optpass.passes.memory.problem import Problem, build, reads_of_changed_inputs
from optpass.passes.memory.schedule import Timeline
from optpass.passes.memory.search import Search

log = logging.getLogger(__name__)

#: Replays of a plan that the search is corrected by; each lowers both graphs once under Inductor.
ROUNDS = 3
#: A graph that others follow is left as it is where they may keep so many times what it keeps.
FOLLOW = 2
#: Of the slack above the floor, a graph that others follow in the same step takes one part in so many.
SHARE = 4
#: Autograd's own scalars: the gradient that `loss.backward()` begins with, and what is made of it.
ENGINE_BYTES = 64
#: What Inductor's generated code needs less than the graphs as they stand, at least; found between 6 and 17%.
GENERATED_LESS = 0.2
#: A plan that uses this part of what it may is not tried to be improved.
USED = 0.98

Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Budget:
    """What one graph may use.

    Attributes:
        bytes: the budget of the step, everything counted.
        statics: what is there throughout the step.
        at_optimizer: peak while the optimizer steps, which no plan changes; bytes, all counted.
        optimizer: its name, for messages.
        trained_itemsize: bytes per element of most parameters.
        shared: more graphs follow in the same step: the slack above the floor is left to them mostly.
        where: what set the budget, for messages.
        notes: what was assumed.
    """

    bytes: int
    statics: Ledger
    at_optimizer: int = 0
    optimizer: str = "none"
    trained_itemsize: int = 4
    shared: bool = False
    where: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What the partitioner decided for one graph, for the report."""

    plan: MemoryPlan | None = None
    replayed: StepReplay | None = None
    replays: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class _Trial:
    modules: Modules
    timeline: Timeline
    replay: StepReplay


class BudgetPartitioner:
    """Splits one joint graph so that its step fits the budget.

    Args:
        budget: what it may use.
        device: finds the spec that times are predicted for; a device in no table is priced by bytes.
        executor: who will run the graphs.
        config_patches: Inductor's settings of this compile.
    """

    def __init__(
        self,
        budget: Budget,
        device: Callable[[], DeviceSpec],
        executor: Executor,
        config_patches: dict[str, Any] | None = None,
    ) -> None:
        self.budget, self.device, self.executor, self.patches = budget, device, executor, config_patches
        self.outcome = Outcome(notes=list(budget.notes))
        self._lowered: dict[bool, Any] = {}

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Modules:
        """As AOTAutograd calls a partitioner.

        Raises:
            BudgetInfeasibleError: no plan fits.
        """
        n_outputs: int = kwargs["num_fwd_outputs"]
        copied = fx.GraphModule(joint, snapshot.copy_graph(joint.graph, keep=True))
        copied.meta.update(joint.meta)
        for node in reads_of_changed_inputs(copied.graph):
            parts.save(node)  # torch's partitioner computes them again from the input as it is after the change
        default = compat.min_cut_partition(copied, joint_inputs, **kwargs)
        parts.prepare(joint)
        problem = self._problem(joint, default, n_outputs)
        room = self.budget.bytes - self.budget.statics.total - ENGINE_BYTES
        search = Search(problem)
        chosen = self._choose(joint, default, search, room, kwargs)
        self._file(search, chosen)
        return default if chosen is None else chosen.modules

    def lowered(self, is_backward: bool) -> Any:
        """What was lowered to replay the plan that was chosen, for Inductor to go on from; once, since it is large."""
        return self._lowered.pop(is_backward, None)

    # ---- the search, corrected ----------------------------------------------------------------------------------

    def _choose(
        self, joint: fx.GraphModule, default: Modules, search: Search, room: int, kwargs: dict[str, Any]
    ) -> _Trial | None:
        """The fastest plan found whose replay fits `room`; None for the default one."""
        tail = self._tail(joint, kwargs["num_fwd_outputs"])
        over = search.unconstrained * (1 - GENERATED_LESS) if self.executor == "inductor" else search.unconstrained
        offset = search.unconstrained - int(over)
        if over <= room:  # else there is no point in lowering the default plan
            base = self._replay(default, kwargs["num_fwd_outputs"], tail)
            self.outcome.replayed = base
            follow = FOLLOW * sum(base.saved_bytes.values()) if self.budget.shared else 0
            if base.peak_bytes + follow <= room:
                if self.budget.at_optimizer > self.budget.bytes:
                    raise self._infeasible(search, search.schedule.run(search.start), base, self.budget.at_optimizer)
                return None
            offset = max(0, search.unconstrained - base.peak_bytes)
        if self.budget.shared:
            low = min(search.floor, room)
            room = low + (room - low) // SHARE
        best: _Trial | None = None
        asked: set[int] = set()
        for _ in range(ROUNDS):
            found = search.at_most(max(room + offset, search.floor))
            assert found is not None  # never below the floor
            timeline = found[1]
            if timeline.peak in asked:
                break
            asked.add(timeline.peak)
            trial = self._carry_out(joint, search.problem, timeline, tail, kwargs)
            fits = trial.replay.peak_bytes <= room
            if fits and (best is None or trial.timeline.recomputed_s < best.timeline.recomputed_s):
                best = trial
            if fits and trial.replay.peak_bytes >= USED * room:
                break
            offset = timeline.peak - trial.replay.peak_bytes
            if not fits and timeline.peak <= search.floor:
                break
        if best is None:
            best = self._floor(joint, search, room, tail, kwargs, asked)
        if self.budget.at_optimizer > self.budget.bytes:
            raise self._infeasible(search, best.timeline, best.replay, self.budget.at_optimizer)
        return best

    def _floor(
        self, joint: fx.GraphModule, search: Search, room: int, tail: Tail, kwargs: dict[str, Any], asked: set[int]
    ) -> _Trial:
        """The plan of the smallest peak, if it fits."""
        found = search.at_most(search.floor)
        assert found is not None
        trial = self._carry_out(joint, search.problem, found[1], tail, kwargs)
        if trial.replay.peak_bytes > room:
            floor = self.budget.statics.total + ENGINE_BYTES + trial.replay.peak_bytes
            raise self._infeasible(search, trial.timeline, trial.replay, floor)
        return trial

    def _carry_out(
        self, joint: fx.GraphModule, problem: Problem, timeline: Timeline, tail: Tail, kwargs: dict[str, Any]
    ) -> _Trial:
        written, saved = rewrite(joint, problem, timeline)
        n_outputs = kwargs["num_fwd_outputs"]
        static = kwargs.get("static_lifetime_input_indices") or ()
        modules = parts.finish(*parts.extract(written, saved, n_outputs, static))
        return _Trial(modules, timeline, self._replay(modules, n_outputs, tail))

    def _replay(self, modules: Modules, n_outputs: int, tail: Tail) -> StepReplay:
        self.outcome.replays += 1
        mutated = parts.mutated_inputs(modules[0])
        return replay_step(
            *modules, n_outputs=n_outputs, executor=self.executor, tail=tail, mutated_inputs=mutated,
            config_patches=self.patches, keep_lowered=True,
        )  # fmt: skip

    # ---- the problem --------------------------------------------------------------------------------------------

    def _problem(self, joint: fx.GraphModule, default: Modules, n_outputs: int) -> Problem:
        forward, backward = parts.outputs(joint, n_outputs)
        saved = [n.name for n in default[1].graph.find_nodes(op="placeholder") if "tangents" not in str(n.target)]
        price = node_prices(
            joint.graph, self.device(), fused=self.executor == "inductor", hint=hint, library=library_workspace
        )
        problem = build(
            joint.graph, *([n for n in part if isinstance(n, fx.Node)] for part in (forward, backward)),
            saved=saved, price=price, hint=hint, granularity=1 if self._on_cpu(joint) else 512,
        )  # fmt: skip
        tail = self._tail(joint, n_outputs)
        tangents = sum(s.bytes for s in problem.storages if s.tangent)
        problem.tail = max(0, tail.saved_bytes + tail.backward_bytes - tangents)
        problem.tangents_held = not parts.tangents_are_boxed()
        return problem

    def _tail(self, joint: fx.GraphModule, n_outputs: int) -> Tail:
        """What happens between the graphs.

        A scalar output is a loss: the gradients of other outputs beside it are zeros that autograd makes. Without one
        the loss is outside of the graph, and is taken to need what cross entropy does: the logarithms of the
        probabilities from its forward, and two gradients of that size in its backward.
        """
        tangents = [n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
        values = [t for t in tangents if isinstance(t, torch.Tensor)]
        size = sum(int(hint(t.numel())) * t.element_size() for t in values if t.dim() > 0)
        if not size:
            return NO_TAIL
        return Tail(True, 0, 0, size) if any(t.dim() == 0 for t in values) else Tail(True, size, size, 2 * size)

    @staticmethod
    def _on_cpu(joint: fx.GraphModule) -> bool:
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return False
        return True

    # ---- words --------------------------------------------------------------------------------------------------

    def _file(self, search: Search, chosen: _Trial | None) -> None:
        replay = self.outcome.replayed if chosen is None else chosen.replay
        assert replay is not None  # the default plan was replayed to find that it fits
        timeline = search.schedule.run(search.start) if chosen is None else chosen.timeline
        self._lowered = {bool(i): lowered.work for i, lowered in enumerate(replay.lowered)}
        self.outcome.replayed = replay = replace(replay, lowered=())
        self.outcome.plan = plan = self._described(search, timeline, replay)
        log.info(
            "memory budget %d: planned peak %d, %d replays",
            self.budget.bytes, plan.predicted_peak_bytes, self.outcome.replays,
        )  # fmt: skip

    def _described(self, search: Search, timeline: Timeline, replay: StepReplay) -> MemoryPlan:
        problem, statics = search.problem, self.budget.statics
        own = replay.peak_bytes + ENGINE_BYTES
        live, workspace = describe.live_at_peak(search.schedule, timeline)
        ledger = describe.ledger(problem, live, workspace, timeline.peak, statics, timeline.saved)
        ledger = replace(ledger, temporaries=max(0, ledger.temporaries - max(0, timeline.peak - own)))
        step = sum(o.seconds for o in problem.operations if o.forward or o.backward)
        unconstrained = search.schedule.run(search.start)
        base = unconstrained.recomputed_s
        most, curve = 1.0, []
        for point in search.way.points:
            most = max(most, 1.0 + point.seconds / step if step > 0 else 1.0)
            curve.append(CurvePoint(statics.total + point.peak, most))
        return MemoryPlan(
            budget_bytes=self.budget.bytes,
            predicted_peak_bytes=max(statics.total + own, self.budget.at_optimizer),
            floor_bytes=max(statics.total + ENGINE_BYTES + search.floor, self.budget.at_optimizer),
            unconstrained_bytes=max(statics.total + ENGINE_BYTES + search.unconstrained, self.budget.at_optimizer),
            ledger=ledger,
            saved=describe.saved_tensors(problem, timeline),
            recomputed=describe.recomputed_tensors(search.schedule, timeline, unconstrained),
            recompute_seconds=max(0.0, timeline.recomputed_s - base),
            step_seconds=step + base,
            curve=tuple(curve),
            outputs_bytes=sum(problem.storages[s].bytes for s in problem.forward_outputs),
        )

    def _infeasible(self, search: Search, timeline: Timeline, replay: StepReplay, floor: int) -> BudgetInfeasibleError:
        plan = self._described(search, timeline, replay)
        live, _ = describe.live_at_peak(search.schedule, timeline)
        largest = [describe.tensor_of(search.problem.storages[s]) for s in live]
        helps = standard_helps(
            plan.ledger, trained_itemsize=self.budget.trained_itemsize, optimizer=self.budget.optimizer
        )
        error = explain_infeasible(
            self.budget.bytes, max(floor, self.budget.at_optimizer), plan.ledger, largest, helps, self.budget.where
        )
        return parts.passed_through(error)
