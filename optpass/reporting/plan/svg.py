"""The curve of peaks and slowdowns, and the bar of the ledger, as SVG. Colours are CSS classes of the page."""

from __future__ import annotations

from xml.sax.saxutils import escape

from optpass.reporting import svg
from optpass.reporting.plan.model import PlanReport
from optpass.reporting.text import percent
from optpass.units import format_bytes

_WIDTH, _HEIGHT = 760.0, 300.0
_AREA = svg.Box(70, 34, 724, 240)
#: Round sizes between ticks, in bytes: 1, 2, 4, ... of each binary unit.
_STEPS = tuple(2**power for power in range(51))
_LEDGER_CSS = {
    "parameters": "ledger-a", "gradients": "ledger-b", "optimizer": "ledger-c", "buffers": "ledger-d",
    "inputs": "ledger-d", "activations": "ledger-e", "temporaries": "ledger-f",
}  # fmt: skip


def curve_chart(plan: PlanReport) -> str:
    """Slowdown over peak: every plan of the curve, the chosen one, and the budget. Empty with fewer than two plans."""
    points = [(float(p.peak_bytes), max(p.slowdown - 1.0, 0.0)) for p in plan.pareto]
    if len(points) < 2:
        return ""
    chosen = (float(plan.predicted_peak_bytes), max(plan.overhead.predicted_slowdown - 1.0, 0.0))
    budget = float(plan.budget_bytes) if plan.budget_bytes is not None else None
    high = max(max(x for x, _ in points), chosen[0])
    low = min(min(x for x, _ in points), chosen[0])
    ticks = _byte_ticks(low, high)
    x_scale = svg.Scale(min(low, ticks[0]), max(high, ticks[-1]), _AREA.x0, _AREA.x1)
    y_ticks = svg.nice_ticks(0.0, max(max(y for _, y in points), chosen[1], 0.01))
    y_scale = svg.Scale(y_ticks[0], y_ticks[-1], _AREA.y1, _AREA.y0)
    parts = [*_axes(ticks, y_ticks, x_scale, y_scale)]
    if budget is not None and x_scale.low <= budget <= x_scale.high:
        x = x_scale(budget)
        parts.append(svg.line(x, _AREA.y0, x, _AREA.y1, "ridge"))
        anchor = "end" if x > (_AREA.x0 + _AREA.x1) / 2 else "start"
        shift = -6 if anchor == "end" else 6
        parts.append(svg.text(x + shift, _AREA.y0 + 4, f"budget {format_bytes(budget)}", anchor=anchor, css="tick"))
    drawn, _ = svg.thin(sorted(points))
    path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in drawn)
    parts.append(f'<polyline points="{path}" class="curve-compiled"/>')
    for x, y in drawn:
        words = f"{format_bytes(x)}: {percent(y)} longer"
        parts.append(
            f'<circle cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3.5" class="point fill-compute">'
            f"<title>{escape(words)}</title></circle>"
        )
    words = f"this plan: {format_bytes(chosen[0])}, {percent(chosen[1])} longer"
    parts.append(
        f'<circle cx="{x_scale(chosen[0]):.1f}" cy="{y_scale(chosen[1]):.1f}" r="7" class="point fill-memory">'
        f"<title>{escape(words)}</title></circle>"
    )
    parts.append(svg.text(_AREA.x0, 20, words, css="legend"))
    return svg.document(_WIDTH, _HEIGHT, "Step time by peak memory: the fastest plan at each peak", parts)


def _axes(ticks: list[float], y_ticks: list[float], x_scale: svg.Scale, y_scale: svg.Scale) -> list[str]:
    parts = []
    for tick in y_ticks:
        parts.append(svg.line(_AREA.x0, y_scale(tick), _AREA.x1, y_scale(tick), "grid"))
        parts.append(svg.text(_AREA.x0 - 8, y_scale(tick) + 4, f"+{tick * 100:.3g}%", anchor="end", css="tick"))
    for tick in ticks:
        if x_scale.low <= tick <= x_scale.high:
            parts.append(svg.line(x_scale(tick), _AREA.y1, x_scale(tick), _AREA.y1 + 4, "axis"))
            parts.append(svg.text(x_scale(tick), _AREA.y1 + 18, format_bytes(tick), anchor="middle", css="tick"))
    parts.append(svg.line(_AREA.x0, _AREA.y1, _AREA.x1, _AREA.y1, "axis"))
    parts.append(svg.text((_AREA.x0 + _AREA.x1) / 2, _HEIGHT - 14, "peak memory", anchor="middle", css="label"))
    middle = (_AREA.y0 + _AREA.y1) / 2
    turn = f'transform="rotate(-90 14 {middle:.0f})"'
    parts.append(svg.text(14, middle, "step time", anchor="middle", css="label", extra=turn))
    return parts


def _byte_ticks(low: float, high: float) -> list[float]:
    """Five or so round sizes from `low` to `high`, both included or passed."""
    span = max(high - low, 1.0)
    step = next((s for s in _STEPS if span / s <= 6), _STEPS[-1])
    first, last = int(low // step), int(-(-high // step))
    return [float(index * step) for index in range(first, last + 1)]


def ledger_bar(plan: PlanReport) -> str:
    """The peak as one bar of full width, a part per entry of the ledger, named where the name fits."""
    total = max(plan.ledger.total, 1)
    height, parts, x = 28.0, [], 0.0
    for name in type(plan.ledger).model_fields:
        size = getattr(plan.ledger, name)
        width = size / total * _WIDTH
        if not size:
            continue
        words = f"{name} {format_bytes(size)}"
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="{height:.0f}" class="{_LEDGER_CSS[name]}">'
            f"<title>{escape(words)}</title></rect>"
        )
        if svg.text_width(words) + 12 < width:
            parts.append(svg.text(x + width / 2, height / 2 + 4, words, anchor="middle", css="on-fill"))
        x += width
    return svg.document(_WIDTH, height, "The peak by what it is made of", parts)
