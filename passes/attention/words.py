"""What the report says of a site: the attention in one line, before and after, and the figures behind the decision."""

from __future__ import annotations

import math

import torch

from optpass.passes.attention.masks import MaskFacts
from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.site import Site
from optpass.passes.attention.targets import Choice


def before(site: Site, facts: list[MaskFacts] | None = None) -> str:
    """`softmax(q·kᵀ·0.125 + causal) v`, with what is known of the mask."""
    scores = site.scores
    inner = "q·kᵀ"
    if scores.softcaps:
        inner = f"{_number(scores.scale)}tanh({inner}·{_number(scores.softcaps[0].inner).rstrip('·')})"
    elif _number(scores.scale):
        inner += f"·{_number(scores.scale).rstrip('·')}"
    inner += "".join("·t" for _ in scores.factors)
    terms = [f.words for f in facts or [] if f.words]
    if facts is None:
        terms = ["mask"] * len(scores.fills) + ["bias"] * len(scores.biases)
    inner += "".join(f" + {t}" for t in dict.fromkeys(terms))
    if site.sink is not None:
        inner += " | sink"
    text = f"softmax({inner})"
    if site.dropout:
        text = f"dropout({text})" if math.isnan(site.dropout) else f"dropout({text}, {site.dropout:g})"
    return f"{_number(site.weight)}{text} v"


def _number(number: float | torch.SymFloat) -> str:
    """`0.125·`; nothing for 1."""
    if isinstance(number, torch.SymFloat):
        return f"{number.node.expr}·"
    return "" if number == 1.0 else f"{number:g}·"


def after(plan: Plan, choice: Choice) -> str:
    """`SDPA flash, is_causal`."""
    name = _NAMES.get(str(choice.target), f"SDPA {choice.kernel}")
    wider = "" if choice.computed_in is None else f" in {str(choice.computed_in).removeprefix('torch.')}"
    parts = [name + wider]
    parts += {"causal": ["is_causal"], "bool": ["bool mask"], "float": ["float mask"]}.get(plan.mask.kind, [])
    parts += ["grouped queries"] if plan.frame.groups else []
    parts += [f"dropout {plan.site.dropout:g} from the kernel's own stream"] if plan.site.dropout else []
    parts += [_ROWS[plan.mask.empty_rows]] if plan.mask.empty_rows in _ROWS else []
    return ", ".join(parts)


#: Targets that have but one kernel.
_NAMES = {"flex": "FlexAttention", "blocks": "attention in blocks"}
_ROWS = {
    "added": "rows without a key as before",
    "exact": "rows without a key as before, step by step",
    "uniform": "rows without a key as before (uniform)",
    "nan": "rows without a key as before (NaN)",
    "zero or NaN": "rows without a key as before (zero or NaN)",
}


def figures(plan: Plan, materialises: bool) -> dict[str, float]:
    """Figures known without a device: bytes that are no longer kept for the backward."""
    problem = plan.problem
    if not problem.training or materialises:
        return {}
    elements = problem.batch * problem.heads * problem.queries * problem.keys
    kept = problem.score_dtype.itemsize  # the softmax's own result, kept for its backward
    if plan.site.softmax.dtype != plan.site.output.dtype:
        kept += plan.site.output.dtype.itemsize  # and its cast, for the product's
    if problem.dropout:
        kept += plan.site.output.dtype.itemsize + 1  # what is left of it, and which
    return {"bytes_not_saved": float(elements * kept)} if math.isfinite(elements) else {}
