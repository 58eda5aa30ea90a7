"""A plan in the terminal. What is said comes from `words`; `layout` lays it out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from optpass.reporting import layout
from optpass.reporting.plan import words
from optpass.reporting.plan.model import PlannedTensor, PlanReport


def render_plan(plan: PlanReport, console: Console, *, top: int = 10) -> None:
    """Print a plan: verdict, ledger, what is saved and recomputed, the curve, offloading, notes.

    Args:
        top: rows per list; how many are left out is said below it.
    """
    layout.title(console, f"optpass plan: {words.title(plan)}", words.subtitle(plan))
    layout.say(console, f"device: {words.device(plan.device)}")
    layout.say(console, words.verdict(plan), "bold")
    layout.heading(console, "Ledger", "bytes at the peak")
    layout.pairs(console, words.ledger_facts(plan))
    layout.heading(console, "Range", "what other budgets could reach")
    layout.pairs(console, words.range_facts(plan))
    _tensors(console, plan, "Recomputed", plan.recomputed, top)
    _tensors(console, plan, "Saved", plan.saved, top)
    curve = words.curve_rows(plan)
    if len(curve) > 1:
        layout.heading(console, "Curve", "the fastest plan at each peak")
        layout.table(console, (">peak", ">step"), curve)
    if offload := words.offload_sentence(plan):
        layout.heading(console, "Offload")
        layout.say(console, offload)
    layout.listed(console, "Notes", plan.notes)


def _tensors(console: Console, plan: PlanReport, name: str, tensors: Sequence[PlannedTensor], top: int) -> None:
    found = words.rows(tensors)
    if not found:
        return
    layout.heading(console, name, "repeated layers together")
    for row in found[:top]:
        layout.say(console, f"- {words.sentence(row, plan)}")
    layout.more(console, top, len(found), "kinds of tensor")
