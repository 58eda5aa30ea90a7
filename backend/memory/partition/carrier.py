"""Carrying out plans of one joint graph: each is written as a forward and a backward, which are replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from optpass.backend import compat
from optpass.backend.compat import partition as parts
from optpass.backend.compat.memory import indices_kept
from optpass.backend.memory.budget import Budget
from optpass.backend.memory.partition.choose import Modules, Trial
from optpass.backend.memory.partition.joint import LEAN, behind, lean_settings
from optpass.backend.memory.partition.order import least_peak
from optpass.backend.memory.replay.replay import Executor, StepReplay, replay_step
from optpass.backend.memory.replay.tail import Tail
from optpass.passes.memory import redraw
from optpass.passes.memory.emit import rewrite
from optpass.passes.memory.search.schedule import FrozenState, State, Timeline
from optpass.passes.memory.search.search import Search
from optpass.passes.memory.uncollected import uncollected

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Carrier:
    """What carries out the plans of a graph.

    Attributes:
        joint: the graph.
        search: its plans.
        fused: these are counted as what is generated for fused kernels.
        executor: who will run what the partitioner makes of it, in the end.
        budget: of it.
        tail: what happens between its halves.
        patches: Inductor's settings of the compile.
        given: what AOTAutograd has told the partitioner.
        counts: told of each replay.
    """

    joint: fx.GraphModule
    search: Search
    fused: bool
    executor: Executor
    budget: Budget
    tail: Tail
    patches: dict[str, Any] | None
    given: Mapping[str, Any]
    counts: Callable[[], None] = lambda: None

    def settings(self) -> tuple[bool, ...]:
        """Whether plans are carried out under Inductor's leanest settings, too."""
        generated = self.executor == "inductor" and compat.lays_out_convolutions()
        return lean_settings(self.joint) if generated else (False,)

    def carry_out(self, timeline: Timeline, lean: bool, runner: Executor) -> Trial:
        """The plan of `timeline`, as `runner` runs it."""
        static = self.given.get("static_lifetime_input_indices") or ()
        with uncollected():
            written, saved = rewrite(self.joint, self.search.problem, timeline, parts.module_of)
            modules = parts.finish(*parts.extract(written, saved, self.given["num_fwd_outputs"], static))
            if self.executor != "inductor":
                redraw.settle(modules[0].graph)
                modules[0].recompile()
        replay = self.replay(modules, runner, settings=LEAN if lean else {}, improve=least_peak)
        return Trial(modules, timeline, replay, self.budget.follow)

    def replay(self, modules: Modules, runner: Executor, **how: Any) -> StepReplay:
        """Forward and backward replayed, as `runner` runs them; `how` as for `replay_step`."""
        self.counts()
        return replay_step(
            *modules, n_outputs=self.given["num_fwd_outputs"], executor=runner,
            tail=behind(self.tail, modules[1], self.budget), mutated_inputs=parts.mutated_inputs(modules[0]),
            config_patches=self.patches, keep_lowered=True, **how,
        )  # fmt: skip

    def replayed(self, state: FrozenState) -> StepReplay | None:
        """What the plan of `state` needs, asked once another one was compiled; None where that cannot be said."""
        with uncollected(), indices_kept():
            try:
                timeline = self.search.schedule.run(State.thawed(state))
                return self.carry_out(timeline, self.settings()[0], self.executor).replay
            except Exception as error:  # the lowering is the inner compiler's; without it, what is counted is known
                said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
                debug = log.isEnabledFor(logging.DEBUG)
                log.warning("memory budget: a plan is taken as it is counted, not replayed: %s", said, exc_info=debug)
                return None
