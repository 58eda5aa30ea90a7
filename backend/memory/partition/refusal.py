"""The error for a budget that no plan of a graph fits: the smallest peak, what is held there, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optpass.backend.compat import partition as parts
from optpass.backend.memory.budget import ENGINE_BYTES, Budget
from optpass.backend.memory.replay.replay import StepReplay
from optpass.errors import BudgetInfeasibleError
from optpass.passes.memory.describe import live_at_peak, tensor_of
from optpass.passes.memory.infeasible import elsewhere, explain_infeasible, smaller_batch, standard_helps
from optpass.passes.memory.plan import Ledger
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search


def refusal(
    budget: Budget, search: Search, timeline: Timeline, replay: StepReplay, ledger: Ledger, floor: int, relief: int,
    not_seen: Sequence[str],
) -> BudgetInfeasibleError:  # fmt: skip
    """To be raised by the caller.

    Args:
        budget: what the graph may use.
        timeline, replay: the plan that needs least, as `search` counts it and as it would run.
        ledger: of its peak.
        floor: bytes of the whole step that it needs.
        relief: bytes of `ledger` that other graphs hold less of from the next step on.
        not_seen: what may make the floor larger, and had not run.
    """
    live, _ = live_at_peak(search.schedule, timeline)
    largest = [tensor_of(search.problem.storages[s]) for s in live]
    held = replace(ledger, activations=max(0, ledger.activations - relief))
    fixed = max(held.parameters + held.gradients + held.optimizer + held.buffers, budget.at_optimizer - held.inputs)
    smaller = smaller_batch(budget.batch, floor, fixed, budget.bytes)
    helps = standard_helps(held, trained_itemsize=budget.trained_itemsize, optimizer=budget.optimizer)
    helps = [smaller, *helps] if smaller is not None else helps
    helps += [elsewhere(budget.elsewhere)] if budget.elsewhere else []
    held_on = max(floor, budget.statics.total + budget.to_accumulate + ENGINE_BYTES + replay.peak_bytes - relief)
    error = explain_infeasible(
        budget.bytes, floor, held, largest, helps, budget.where, accumulating=held_on, likely=budget.likely,
        not_seen=not_seen,
    )  # fmt: skip
    return parts.passed_through(error)
