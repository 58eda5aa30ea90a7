"""What is said of a step whose graphs are planned together: in the log, in the report, and where no plans fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optpass.backend.memory.budget import ENGINE_BYTES
from optpass.backend.memory.elsewhere import said_of
from optpass.backend.memory.filing import add_note
from optpass.backend.memory.partition.partitioner import NEXT
from optpass.backend.memory.plans.bounds import Choice, total
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.stores import Stores
from optpass.errors import BudgetInfeasibleError
from optpass.reporting import store
from optpass.units import format_bytes

if TYPE_CHECKING:
    from optpass.backend.memory.together.together import Step

log = logging.getLogger(__name__)


def planned_together(step: Step, chosen: Sequence[Choice], worst: int, over: int) -> None:
    """What the graphs needed as they were planned one by one, and need now; a warning where that was too much."""
    now = max(total(step.present, b) for b in step.bounds) + ENGINE_BYTES
    then = max(total(chosen, b) for b in step.bounds) + ENGINE_BYTES
    limit = max(b.limit for b in step.bounds) + ENGINE_BYTES
    runs = ", ".join(f"{n} times" for n in sorted({_most(step, i) for i in range(len(step.leaves))}) if n > 1)
    what = f"{len(step.leaves)} graphs" if len(step.leaves) > 1 else "1 graph"
    what += f", one of them {runs}," if runs and len(step.leaves) > 1 else f", which runs {runs}," if runs else ""
    text = (
        f"memory budget: a step of {what} needs {format_bytes(now)} as its graphs were planned one by one; they are "
        f"planned together now, for {format_bytes(then)} of a budget of {format_bytes(limit)}"
    )
    if over > 0:
        text += "; eager code between the graphs may need more than that"
    log.warning("%s", text) if worst > 0 else log.info("%s", text)
    if worst > 0:
        store.current().warn(text)


def next_plan(step: Step, more: int | None) -> None:
    """Nothing faster fits a budget that is used in part: what the next plans need, where the fullest graph is filed."""
    fullest = max(step.bounds, key=lambda b: total(step.present, b) - b.limit)
    partitioner = step.leaves[fullest.graph].partitioner
    if more is not None and not any(note.startswith(NEXT) for note in partitioner.outcome.notes):
        add_note(partitioner, f"{NEXT} {format_bytes(fullest.limit + ENGINE_BYTES + more)}")


def warn_of_kept_graphs(leaves: Sequence[Leaf]) -> None:
    """Say once of each graph that a backward keeps what it has saved, which its first plan takes to be released."""
    for leaf in leaves:
        replayed = leaf.partitioner.outcome.replayed
        if leaf.keeps_graph and replayed is not None:
            leaf.keeps_graph = None
            size = format_bytes(sum(replayed.saved_bytes.values()))
            text = (
                "memory budget: a backward with retain_graph=True keeps what the graph has saved: the first step may "
                f"have needed up to {size} more than was predicted; those that follow count it, and need less where "
                "the losses are added up for one backward"
            )
            log.warning("%s", text)
            store.current().warn(text)


def warn_of_the_optimizer(step: Step) -> None:
    """Say that the step of the optimizer may need more than the budget, which no plan of a graph changes."""
    budget = min(leaf.partitioner.budget.bytes for leaf in step.leaves)
    if step.at_optimizer > budget:
        text = (
            f"memory budget: while {step.optimizer} steps, up to {format_bytes(step.at_optimizer)} are there, more "
            f"than the budget of {format_bytes(budget)}; let go of outputs before, or use an optimizer that needs less"
        )
        log.warning("%s", text)
        store.current().warn(text)


def too_much_at_the_optimizer(step: Step) -> BudgetInfeasibleError:
    """The step of the optimizer needs more than the budget, which no plan of a graph changes."""
    advice = "Let go of outputs before, or use an optimizer that needs less."
    return _needs(step, f"while {step.optimizer} steps, this step", step.sure_at_optimizer, advice)


def too_much_ahead(step: Step) -> BudgetInfeasibleError:
    """A graph without gradients that runs for the step needs more than the budget, which no plan of it changes."""
    what = "what runs for this step ahead of its forward, without gradients or in eager code,"
    return _needs(step, what, step.ahead, "Run it on parts of the batch, or use a smaller micro-batch.")


def _needs(step: Step, what: str, needed: int, advice: str) -> BudgetInfeasibleError:
    least = min((leaf.partitioner.budget for leaf in step.leaves), key=lambda budget: budget.bytes)
    text = (
        f"{least.where}: {what} needs {needed} bytes ({format_bytes(needed)}) with what is there beside it, budget "
        f"{least.bytes} bytes. {advice}"
    )
    return BudgetInfeasibleError(text, floor_bytes=needed, budget_bytes=least.bytes)


def infeasible(step: Step, chosen: Sequence[Choice], over: int) -> BudgetInfeasibleError:
    """No plans fit: how far the least of them is over, and what needs how much."""
    worst = max(step.bounds, key=lambda b: total(chosen, b) - b.limit)
    budget = worst.limit + ENGINE_BYTES
    others = sum(chosen[g].held * n for g, n in worst.others)
    text = (
        f"{step.leaves[worst.graph].partitioner.budget.where}: the graphs of this step together need at least "
        f"{budget + over} bytes ({format_bytes(budget + over)}), budget {budget} bytes: {format_bytes(worst.fixed)} "
        f"parameters, gradients, optimizer state and inputs, {format_bytes(others)} held by "
        f"{sum(n for _, n in worst.others)} runs that wait for their backward, and "
        f"{format_bytes(worst.needed(chosen[worst.graph]))} while one runs. Compile the whole model as one graph, or "
        "use a smaller micro-batch."
    )
    lying = Stores()
    for leaf in step.leaves:
        lying.update(leaf.elsewhere)
    text = " ".join((text, *(f"Of that, {said}." for said in said_of(lying))))
    return BudgetInfeasibleError(text, floor_bytes=budget + over, budget_bytes=budget)


def _most(step: Step, index: int) -> int:
    """How many runs of a graph wait at once, at most."""
    counts = [1] + [n for b in step.bounds for g, n in b.others if g == index and b.graph != index]
    return max(counts + [n + 1 for b in step.bounds if b.graph == index for g, n in b.others if g == index])
