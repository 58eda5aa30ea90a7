"""A plan as one offline page. The words come from `words`, the drawings from `svg`; the template lays them out."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from optpass.reporting.files import Path_, write_text
from optpass.reporting.html import LIMIT_BYTES, cut, environment
from optpass.reporting.plan import svg, words
from optpass.reporting.plan.model import PlanReport
from optpass.reporting.text import percent
from optpass.units import format_bytes

_ROWS = 200  # rows per table at first; halved until the page fits


def render_plan_html(plan: PlanReport) -> str:
    """The page as text, at most `LIMIT_BYTES` long in UTF-8: tables are cut, and say by how much, until it fits."""
    rows = _ROWS
    while True:
        page = environment().get_template("plan.html.j2").render(**_context(plan, rows))
        if len(page.encode()) <= LIMIT_BYTES or rows == 1:
            return page
        rows = max(1, rows // 2)


def write_plan_html(plan: PlanReport, path: Path_) -> None:
    """Write the page, atomically; parent folders are made.

    Raises:
        ReportError: the path cannot be written; nothing is left behind.
    """
    write_text(render_plan_html(plan), path)


def _context(plan: PlanReport, rows: int) -> dict[str, Any]:
    saved, recomputed = words.rows(plan.saved), words.rows(plan.recomputed)
    return {
        "obj": plan,
        "title": f"{plan.target}: memory plan",
        "subtitle": words.subtitle(plan),
        "device": words.device(plan.device),
        "verdict": words.verdict(plan),
        "cards": _cards(plan),
        "ledger": words.ledger_facts(plan),
        "ledger_bar": Markup(svg.ledger_bar(plan)),  # the SVG functions escape every text that they are given
        "range": words.range_facts(plan),
        "chart": Markup(svg.curve_chart(plan)),
        "tables": [
            ("Recomputed", "Not kept: the backward makes them again where it needs them.", cut(recomputed, rows)),
            ("Saved", "Kept from the forward for the backward.", cut(saved, rows)),
        ],
        "sentence": lambda row: words.sentence(row, plan),
        "step_us": plan.overhead.step_us,
        "offload": words.offload_sentence(plan),
        "notes": cut(plan.notes, rows),
    }


def _cards(plan: PlanReport) -> list[tuple[str, str, str]]:
    """(value, what it is, more of it) of the figures that matter most."""
    budget = f"of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes is not None else "no budget"
    longer = percent(max(plan.overhead.predicted_slowdown - 1, 0.0))
    return [
        (format_bytes(plan.predicted_peak_bytes), "predicted peak", budget),
        (format_bytes(plan.unconstrained_bytes), "without a budget", "everything that pays is saved"),
        (format_bytes(plan.floor_bytes), "smallest peak", "of any plan"),
        (longer, "longer step", f"{percent(plan.overhead.recompute_flops_fraction)} more FLOPs"),
    ]
