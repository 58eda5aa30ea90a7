"""What to plan: a way to capture the step at a micro-batch, and everything else that the answer depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpass.options import Options
from optpass.planning.shard import Shard
from optpass.units import Budget

if TYPE_CHECKING:
    from optpass.backend.ahead import Capture
    from optpass.passes.devices import DeviceSpec
    from optpass.passes.memory.optimizers.optimizers import OptimizerCost
    from optpass.planning.prepare import Prepared

#: Told the fraction done (None where nobody knows) and what is being done.
Progress = Callable[[float | None, str], None]
#: What an optimizer needs, but for the parameters of these names, which it holds and which get no gradient.
CostBut = Callable[[Collection[str]], "OptimizerCost"]


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        name: what the plan calls it.
        capture: its graphs, joint ones included.
        batch: the micro-batch that it was captured at; None where the target does not say.
        notes: what a reader must know.
    """

    name: str
    capture: Capture
    batch: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One question to the planner.

    Attributes:
        capture: traces the step at a micro-batch (None: as the target has it), with the given passes.
        device: what to plan for.
        budget: what was asked for; None for none.
        where: what set the budget, with its value, for messages.
        optimizer: name of the table; None for none.
        settings: what the optimizer is constructed with beyond the table's.
        found: what the optimizer needs, where it was found rather than named; without state for what is not trained.
        accumulation: micro-batches per optimizer step.
        shard: how the state is divided; None for one device.
        options: the backend's options, which say what passes run.
        search_batch: look for the largest micro-batch that fits.
        headroom: part of the budget that the search leaves free.
        batch: the micro-batch to plan for; None for the target's own.
        progress: told what is being done.
        quick: a compile follows, which plans for itself: what is counted will do, unless it would be refused.
    """

    capture: Callable[[int | None, Prepared], Captured]
    device: DeviceSpec
    budget: Budget | None = None
    where: str = "memory_budget"
    optimizer: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    found: CostBut | None = None
    accumulation: int = 1
    shard: Shard | None = None
    options: Options = field(default_factory=Options)
    search_batch: bool = False
    headroom: float = 0.0
    batch: int | None = None
    progress: Progress = field(default=lambda fraction, text: None)
    notes: tuple[str, ...] = ()
    quick: bool = False
