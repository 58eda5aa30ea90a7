"""The partitioner of a compile that has a memory budget: default plan where that fits, else the fastest that does.

The search counts storages over the joint graph, which is exact where the graph is run as it stands, and of what
Inductor generates a model. So each chosen plan is replayed as the inner compiler would run it, and the search is asked
again with the difference taken into account, a few times at most.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from optpass.backend import compat, snapshot
from optpass.backend.compat import partition as parts
from optpass.backend.compat.memory import STANDING, indices_kept
from optpass.backend.memory.budget import ENGINE_BYTES, Budget
from optpass.backend.memory.partition.accumulate import own_gradients
from optpass.backend.memory.partition.carrier import Carrier
from optpass.backend.memory.partition.choose import Chooser, Modules, Trial
from optpass.backend.memory.partition.growth import sizes_in
from optpass.backend.memory.partition.joint import (
    assumed_of,
    loss_is_outside,
    not_seen,
    numbers_kept,
    problem_of,
    tails_of_one,
)
from optpass.backend.memory.partition.offered import needed_beside_more, offered_plan
from optpass.backend.memory.partition.offloading import Walk, host_of, offloaded
from optpass.backend.memory.partition.outcome import Outcome, plan_of
from optpass.backend.memory.partition.ready import made_ready
from optpass.backend.memory.partition.refusal import refusal
from optpass.backend.memory.partition.standing import CANNOT_STAND, STANDS, CannotStandError, can_stand
from optpass.backend.memory.partition.unbounded import refused_where_unbounded
from optpass.backend.memory.plans.searches import SEARCHES, beneath
from optpass.backend.memory.replay.replay import Executor, StepReplay
from optpass.backend.memory.replay.tail import NO_TAIL, Tail
from optpass.errors import BudgetInfeasibleError
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory.plan import MemoryPlan
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search
from optpass.passes.memory.uncollected import uncollected
from optpass.units import format_bytes

log = logging.getLogger(__name__)

#: A graph that others follow is left as it is where they may keep so many times what it keeps.
FOLLOW = 2
#: The default plan needs at least this part of what is counted; found between 0.92 and 1.17 of what Inductor generates.
REPLAYED_AT_LEAST = 0.85
#: How a note begins that says what the next plan needs, where the budget is used in part.
NEXT = "the next plan, which recomputes less, needs"


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
        self.offloads = True  #: the option allows it
        self.search: Search | None = None  #: of the graph, for plans of the step as a whole
        self.relief: Callable[[], int] = lambda: 0  #: bytes that other graphs can hold less of from the next step on
        #: Its budget if nothing else trains what it does not, by positions; holds the graph's tensors, so is dropped.
        self.if_nothing_else_trains: Callable[[Collection[int]], Budget] | None = None
        self.follows = False  #: the graph ends in a graph break
        self.may_stand = False  #: it is planned anew in the next step, and may run as it stands in this one
        self.others_stand = False  #: others that run as they stand wait for it
        self.as_it_stands = False  #: it does
        self.least = False  #: the smallest plan alone is wanted: no budget is looked for
        self.ungraded: tuple[int, ...] = ()  #: positions of those; none where the caches answered
        self.sizes: list[Any] | None = None  #: symbolic sizes of the graph's tensors; None where the caches answered
        self.tail = budget.tail or NO_TAIL  #: what happens between forward and backward, as the plan has it
        self.at_optimizer = budget.at_optimizer  #: with outputs that the caller is taken to hold; or ahead of the step
        self.counted = 0  #: peak of the plan as the search counts it
        self._lowered: dict[bool, Any] = {}
        self.carrier: Carrier | None = None  #: carries out plans of the graph; None where the caches answered
        self._default_peak: int | None = None  #: of the default plan, above the statics, where it was replayed

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Modules:
        """As AOTAutograd calls a partitioner.

        Raises:
            BudgetInfeasibleError: no plan fits.
            ConfigError: a size depends on the data, and nothing bounds it.
        """
        with self._deciding():
            return self._split(joint, joint_inputs, kwargs)

    def planned(self, joint: fx.GraphModule, default: Modules, given: dict[str, Any]) -> MemoryPlan:
        """The plan alone, of a graph that is `made_ready`, of which nothing is changed.

        Args:
            joint, default: the graph, and the default partitioner's halves of it.
            given: what AOTAutograd tells a partitioner.

        Raises: as a call.
        """
        halves = tuple(parts.module_of(half, snapshot.copy_graph(half.graph, keep=True)) for half in default)
        with self._deciding():
            self._assumed(joint, (halves[0], halves[1]), given)
        self._lowered = {}
        assert self.outcome.plan is not None  # else it has raised
        return self.outcome.plan

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        # What Inductor makes for each replay holds much in cycles, and is collected.
        kept = contextlib.nullcontext() if self.executor == "inductor" else uncollected()
        with refused_where_unbounded(self.budget.where), kept:
            yield

    def _split(self, joint: fx.GraphModule, joint_inputs: Any, kwargs: dict[str, Any]) -> Modules:
        fused = self.executor == "inductor"
        default = made_ready(joint, joint_inputs, compat.min_cut_partition, kwargs, fused=fused)
        self.sizes = sizes_in(joint.graph)
        self.ungraded = parts.ungraded_inputs(joint.graph, kwargs["num_fwd_outputs"])
        asked = self.if_nothing_else_trains or (lambda ungraded: self.budget)
        if not self.follows:
            self.budget = asked(self.ungraded)
        try:
            return self._assumed(joint, default, kwargs)
        except BudgetInfeasibleError as error:
            fewer = asked(self.ungraded) if self.follows else self.budget
            if fewer is self.budget:
                raise
            self.budget = replace(fewer, likely=error.floor_bytes)  # the graphs that follow may not train it either
            return self._assumed(joint, default, kwargs)

    def _assumed(self, joint: fx.GraphModule, default: Modules, kwargs: dict[str, Any]) -> Modules:
        """The graph split for the first of the assumptions about what happens behind it that fits."""
        named: BudgetInfeasibleError | None = None
        if self.budget.apart is not None and loss_is_outside(joint):
            self.budget = replace(self.budget, shared=True)
        if not self.budget.settled:  # else they are among what was seen
            self.budget = self.budget.with_more(numbers_kept(joint))
        self._not_seen = not_seen(joint, self.budget)
        given, ahead, assumed = self.budget.statics, self.budget.ahead, assumed_of(joint, self.budget)
        alone = tails_of_one(joint)
        for tail, more in assumed:
            self.budget = replace(self.budget, statics=given.plus(more), ahead=ahead and ahead + more.inputs)
            try:
                return self._planned(joint, default, tail, kwargs)
            except BudgetInfeasibleError as error:  # what nobody has seen may need less than what is likely
                least = self.budget.shared or tail.early_bytes or tail.kept_bytes
                if more == assumed[-1][1] and (
                    named is None or least or (tail in alone and error.floor_bytes < named.floor_bytes)
                ):
                    named = error
        raise named or AssertionError("nothing was assumed")

    def _planned(self, joint: fx.GraphModule, default: Modules, tail: Tail, kwargs: dict[str, Any]) -> Modules:
        """The graph split with `tail` between its halves."""
        self.tail, self._default_peak, self.at_optimizer = tail, None, self.budget.at_optimizer

        def carrier_of(*, fused: bool) -> Carrier:
            problem = problem_of(
                joint, default, kwargs["num_fwd_outputs"], self.device, fused=fused, tail=tail,
                follow=self.budget.follow,
            )  # fmt: skip
            search, count = Search(problem, known=SEARCHES), self.outcome.count_replay
            return Carrier(joint, search, fused, self.executor, self.budget, tail, self.patches, kwargs, count)

        self.carrier = carrier = carrier_of(fused=self.executor == "inductor")
        self.search, problem = carrier.search, carrier.search.problem
        if tail.holds_outputs and not self.budget.settled:
            sizes = [problem.storages[s].bytes for s in problem.forward_outputs]
            self.at_optimizer += sum(size for size in sizes if size > ENGINE_BYTES // 4)  # numbers are an optimizer's
        self.at_optimizer = max(self.at_optimizer, self.budget.ahead)
        room = self.budget.bytes - self.budget.statics.total - ENGINE_BYTES
        with indices_kept() if self.executor == "inductor" else contextlib.nullcontext():
            ways = (lambda: carrier, lambda: carrier_of(fused=False)) if self.may_stand else ()
            standing = self._standing(default, ways if can_stand(joint.graph) else (), room)
            chosen, search = standing or (self._choose(default, carrier, room), carrier.search)
        self._file(search, chosen)
        modules = default if chosen is None else chosen.modules
        if self.runner != "inductor":  # what that returns is none
            own_gradients(modules[1])
        return modules

    @property
    def runner(self) -> Executor:
        """Who runs the graph."""
        return "graph" if self.as_it_stands else self.executor

    def lowered(self, is_backward: bool) -> Any:
        """What was lowered to replay the plan that was chosen, for Inductor to go on from; once, since it is large."""
        return STANDING if self.as_it_stands else self._lowered.pop(is_backward, None)

    # ---- the plan -----------------------------------------------------------------------------------------------

    def _standing(
        self, default: Modules, carriers: Iterable[Callable[[], Carrier]], room: int
    ) -> tuple[Trial | None, Search] | None:
        """As `_choose`, with the search, for a graph that runs as it stands, where it fits so and is to be planned
        anew; else None. Plans are those of the first of the `carriers` that has one: those for fused kernels are needed
        later, too, and what they need without any is replayed at once."""
        notes, stands = list(self.outcome.notes), True
        for carrier_of in carriers:
            self.as_it_stands = True
            try:
                chosen = self._choose(default, carrier := carrier_of(), room)
                if stands := chosen is not None or self.others_stand:
                    self.outcome.notes.append(STANDS)
                    return chosen, carrier.search
            except (CannotStandError, BudgetInfeasibleError):
                log.debug("a graph does not fit as it stands")
            except Exception as error:  # its replay ran into something that is no error of what is generated
                said = f"{CANNOT_STAND}: {type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
                log.warning("memory budget: %s", said, exc_info=log.isEnabledFor(logging.DEBUG))
                notes.append(said)
                stands = False
            self.as_it_stands, self._default_peak, self.outcome.notes = False, None, list(notes)
            if not stands:
                break
        return None

    def _choose(self, default: Modules, carrier: Carrier, room: int) -> Trial | None:
        """The fastest plan found whose replay fits `room`; None for the default one."""
        search, settings = carrier.search, carrier.settings()

        def carry_out(timeline: Timeline, lean: bool = settings[0]) -> Trial:
            return carrier.carry_out(timeline, lean, self.runner)

        base: StepReplay | None = None
        kept = FOLLOW * search.saved_at_start if self.budget.shared else 0
        likely = (search.unconstrained + kept) * REPLAYED_AT_LEAST <= room  # else a replay of it is in vain
        if likely and not self.budget.lenient:
            base = self._replayed_default(default, carrier)
            follow = FOLLOW * sum(base.saved_bytes.values()) if self.budget.shared else 0
            if self.budget.to_come:  # what the others hold and return, and what a loss makes of that
                follow = max(follow, (self.budget.to_come + 1) * base.handed_bytes)
            if self._needed(base) + follow <= room:
                if self.at_optimizer > self.budget.bytes:
                    raise self._infeasible(search, search.schedule.run(search.start), base, self.at_optimizer)
                return None

        chooser = Chooser(
            search, carry_out, room, self.budget.bytes - room, generated=carrier.fused,
            settings=settings, beneath=lambda: beneath(search),
        )  # fmt: skip
        offered = offered_plan(self.budget, search, carry_out, room, brief=self.as_it_stands)
        if self.as_it_stands and (offered is None or offered.peak > room) and self.budget.shared:
            raise CannotStandError
        found = chooser.better(offered) if offered and not (self.budget.shared or self.budget.whole) else offered
        found = found or (None if self.least else chooser.best()) or chooser.smallest()
        found = self._offloaded(carrier, carry_out, room, found)
        if self.as_it_stands and found.peak > room:
            raise CannotStandError
        relief = self.relief() if found.peak > room else 0
        if found.peak > room and (self.budget.lenient or found.peak - relief <= room):
            self.outcome.notes.append("over the budget in the first step: earlier graphs hold less from the next on")
        elif found.peak > room:
            base = base or self._replayed_default(default, carrier)  # the search may be wrong about this step
            least = min(found.peak - relief, self._needed(base))
            if least > room or self.at_optimizer > self.budget.bytes:
                least = max(least, needed_beside_more(self.budget, search, carry_out))
                floor = self.budget.statics.total + ENGINE_BYTES + least
                raise self._infeasible(search, found.timeline, found.replay, floor, relief)
            return None
        if self.at_optimizer > self.budget.bytes and not self.budget.lenient:
            raise self._infeasible(search, found.timeline, found.replay, self.at_optimizer)
        alone = base is None and not (self.budget.shared or self.budget.lenient)
        likely = search.unconstrained * found.peak <= room * found.timeline.peak  # after what was replayed
        if alone and likely and self._needed(self._replayed_default(default, carrier)) <= room:
            return None
        above = None if self.budget.shared or found.timeline.offloaded else chooser.unused(found)
        if above is not None:
            needed = format_bytes(self.budget.bytes - room + above)
            self.outcome.notes.append(f"{NEXT} {needed}")
        return found

    def _offloaded(self, carrier: Carrier, carry_out: Callable[[Timeline], Trial], room: int, found: Trial) -> Trial:
        """`found`, or a faster plan with tensors in host memory. Not beside other runs of the step: what they need of
        each other is planned without."""
        alone = not (self.budget.shared or self.budget.again or self.budget.lenient or self.budget.follow)
        alone = alone and self.offloads and not self.as_it_stands
        host = host_of(carrier.joint, carrier.search.problem, self.device()) if alone else None
        if host is None or (found.peak <= room and not found.timeline.recomputed_s):
            return found
        return offloaded(Walk(carrier.search, host, self.device().launch_s), carry_out, room, found) or found

    def _replayed_default(self, default: Modules, carrier: Carrier) -> StepReplay:
        self.outcome.replayed = base = carrier.replay(default, self.runner)
        self._default_peak = base.peak_bytes
        return base

    def _needed(self, base: StepReplay) -> int:
        """Bytes above the statics that the step needs with a plan."""
        return max(base.peak_bytes, base.handed_bytes + self.budget.follow if self.budget.follow else 0)

    # ---- words --------------------------------------------------------------------------------------------------

    def _file(self, search: Search, chosen: Trial | None) -> None:
        replay = self.outcome.replayed if chosen is None else chosen.replay
        assert replay is not None  # the default plan was replayed to find that it fits
        timeline = search.schedule.run(search.start) if chosen is None else chosen.timeline
        self.counted = timeline.peak
        self._lowered = {bool(i): lowered.work for i, lowered in enumerate(replay.lowered)}
        self.outcome.replayed = replay = replace(replay, lowered=())
        self.outcome.plan = plan = self._described(search, timeline, replay)
        peak, replays = plan.predicted_peak_bytes, self.outcome.replays
        log.info("memory budget %d: planned peak %d, %d replays", self.budget.bytes, peak, replays)

    def _described(self, search: Search, timeline: Timeline, replay: StepReplay) -> MemoryPlan:
        return plan_of(
            search, timeline, budget_bytes=self.budget.bytes, statics=self.budget.statics, engine=ENGINE_BYTES,
            own=replay.peak_bytes + ENGINE_BYTES, at_optimizer=self.at_optimizer,
            unconstrained=self._default_peak, generated=self.executor == "inductor",
        )  # fmt: skip

    def _infeasible(
        self, search: Search, timeline: Timeline, replay: StepReplay, floor: int, relief: int = 0
    ) -> BudgetInfeasibleError:
        plan = self._described(search, timeline, replay)
        return refusal(self.budget, search, timeline, replay, plan.ledger, max(floor, self.at_optimizer), relief,
                       self._not_seen)  # fmt: skip
