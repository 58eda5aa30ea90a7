"""SVG from numbers: axes, text, the loss curve and the bar of shares. Pure functions from data to markup.

Colours are CSS classes, which the page defines for light and dark. The roofline chart is `svg_roofline`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from optpass.reporting.summary import BoundShare

FONT = 12.0  #: text size in user units
_CHAR = 0.6  # mean advance of a sans-serif glyph, in ems; wide enough for what is written here
_MOST_POINTS = 400


@dataclass(frozen=True)
class Box:
    """An axis-aligned rectangle, y downwards."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlaps(self, other: Box) -> bool:
        """Whether the two share any area."""
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def within(self, other: Box) -> bool:
        """Whether this one lies wholly in `other`."""
        return self.x0 >= other.x0 and self.x1 <= other.x1 and self.y0 >= other.y0 and self.y1 <= other.y1


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto coordinates from `start` to `end`, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log10(value / self.low) / math.log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def text_width(content: str, size: float = FONT) -> float:
    """An upper estimate of how wide text is drawn; a browser's own font decides."""
    return len(content) * size * _CHAR


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str = "", extra: str = "") -> str:
    """A text element; `anchor` is start, middle or end."""
    classes = f" class={quoteattr(css)}" if css else ""
    more = f" {extra}" if extra else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}{more}>{escape(printable(content))}</text>'


def line(x0: float, y0: float, x1: float, y1: float, css: str) -> str:
    """A line element."""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{css}"/>'


def printable(content: str) -> str:
    """Control characters as spaces: XML has no way to write them."""
    return "".join(c if c.isprintable() else " " for c in content)


def document(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """The svg element; `label` is what a screen reader says of it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
    return f"{head}aria-label={quoteattr(printable(label))}>{''.join(parts)}</svg>"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) from `low` to `high`, both included or passed."""
    span = (high - low) or abs(high) or 1.0
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def share_bar(shares: Sequence[BoundShare], label: str) -> str:
    """One bar of full width, a part per bound, with the percentage where it fits."""
    width, height = 760.0, 28.0
    parts, x = [], 0.0
    for share in shares:
        part = share.share * width
        words = f"{share.bound} {share.share:.0%}"
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{part:.1f}" height="{height:.0f}" class="fill-{share.bound}">'
            f"<title>{escape(words)}</title></rect>"
        )
        if text_width(words) + 12 < part:
            parts.append(text(x + part / 2, height / 2 + 4, words, anchor="middle", css="on-fill"))
        x += part
    return document(width, height, label, parts)


def thin(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> tuple[Sequence[tuple[float, float]], int]:
    """Every k-th point, and the last, so that at most about `most` remain; and k."""
    every = max(1, math.ceil(len(points) / most))
    kept = list(points[::every])
    if every > 1 and points[-1] != kept[-1]:
        kept.append(points[-1])
    return kept, every


def loss_chart(compiled: Sequence[tuple[float, float]], eager: Sequence[tuple[float, float]]) -> str:
    """Loss by training step: the compiled run as a thin line over the eager run as a wide one. Empty without points.

    Args:
        compiled: (step, loss) of the run that the report is about.
        eager: the same of the run without the compiler; may be empty.
    """
    everything = [*compiled, *eager]
    if not everything:
        return ""
    width, height, area = 760.0, 300.0, Box(64, 34, 744, 252)
    x_ticks = [t for t in nice_ticks(min(s for s, _ in everything), max(s for s, _ in everything), 6) if t == int(t)]
    y_ticks = nice_ticks(min(v for _, v in everything), max(v for _, v in everything))
    x_high = max(max(s for s, _ in everything), x_ticks[0] + 1 if x_ticks else 1)
    x_scale = Scale(min(s for s, _ in everything), x_high, area.x0, area.x1)
    y_scale = Scale(y_ticks[0], y_ticks[-1], area.y1, area.y0)
    parts = []
    for tick in y_ticks:
        parts.append(line(area.x0, y_scale(tick), area.x1, y_scale(tick), "grid"))
        parts.append(text(area.x0 - 8, y_scale(tick) + 4, f"{tick:g}", anchor="end", css="tick"))
    for tick in x_ticks:
        if x_scale.low <= tick <= x_scale.high:
            parts.append(line(x_scale(tick), area.y1, x_scale(tick), area.y1 + 4, "axis"))
            parts.append(text(x_scale(tick), area.y1 + 18, f"{tick:,.0f}", anchor="middle", css="tick"))
    parts.append(line(area.x0, area.y1, area.x1, area.y1, "axis"))
    parts.append(text((area.x0 + area.x1) / 2, height - 10, "training step", anchor="middle", css="label"))
    turn = f'transform="rotate(-90 16 {(area.y0 + area.y1) / 2:.0f})"'
    parts.append(text(16, (area.y0 + area.y1) / 2, "loss", anchor="middle", css="label", extra=turn))
    x = area.x0
    for points, css, name in ((eager, "curve-eager", "eager"), (compiled, "curve-compiled", "compiled with optpass")):
        if not points:
            continue
        drawn, every = thin(points)
        name += f" (every {every}th step drawn)" if every > 1 else ""
        path = " ".join(f"{x_scale(step):.1f},{y_scale(loss):.1f}" for step, loss in drawn)
        parts.append(f'<polyline points="{path}" class="{css}"/>')
        parts.append(line(x, 16, x + 24, 16, css))
        parts.append(text(x + 30, 20, name, css="legend"))
        x += 30 + text_width(name) + 24
    return document(width, height, "Training loss by step", parts)
