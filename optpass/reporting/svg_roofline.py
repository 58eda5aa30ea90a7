"""The roofline chart (Williams, Waterman, Patterson 2009) as SVG, from a device and its ops. Pure functions.

x: arithmetic intensity in FLOP per byte; y: FLOP/s that the op is predicted to attain; both logarithmic. Roofs are
what is attainable, not the datasheet's peak. An op's area is its share of the predicted time, its colour and shape
what bounds it. Ops without FLOPs have no place on a logarithmic axis; `undrawn` says how many and how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from optpass.reporting import svg, text
from optpass.reporting.model import DeviceRecord
from optpass.reporting.summary import OpRow, place
from optpass.reporting.svg import Box, Scale
from optpass.units import format_bytes, format_flops, format_rate

WIDTH, HEIGHT = 960.0, 520.0
_AREA = Box(72, 52, 800, 460)
_LEAST_SHARE = 0.01  # ops that take less are drawn as large as this
_LABEL_WIDTH = 30  # characters of an op's name written in the chart
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
_LEGEND = (
    ("compute", "compute-bound"),
    ("memory", "memory-bound"),
    ("launch", "launch-bound"),
    ("unknown", "bound unknown"),
    ("none", "no bound"),
)


@dataclass(frozen=True)
class Roofs:
    """Attainable bandwidth in B/s, and (dtypes, FLOP/s) of each ceiling, highest first."""

    bandwidth: float
    ceilings: tuple[tuple[str, float], ...]


def roofs(device: DeviceRecord, rows: Sequence[OpRow]) -> Roofs | None:
    """The roofs that bound these ops; dtypes of equal rate share one. None where the device lacks a figure."""
    used = dict.fromkeys(row.op.dtype for row in rows if row.op.flops > 0)
    rates = {name: device.attainable_flops[name] for name in used if device.attainable_flops.get(name, 0) > 0}
    if not rates or device.attainable_bandwidth <= 0:
        return None
    by_rate: dict[float, list[str]] = {}
    for name, rate in rates.items():
        by_rate.setdefault(rate, []).append(name)
    ceilings = tuple((_joined(sorted(names)), rate) for rate, names in sorted(by_rate.items(), reverse=True))
    return Roofs(device.attainable_bandwidth, ceilings)


def _joined(names: Sequence[str], most: int = 2) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def drawable(rows: Sequence[OpRow]) -> list[OpRow]:
    """Ops that have a place on logarithmic axes."""
    return [row for row in rows if row.op.flops > 0 and row.op.intensity > 0 and row.op.time_us > 0]


def roofline_chart(device: DeviceRecord, rows: Sequence[OpRow], *, most: int = 200, labelled: int = 6) -> str:
    """The chart as an svg element; empty where there is no roof or no op to draw.

    Args:
        rows: ranked ops (`summary.rank_ops`); the first `most` with FLOPs are drawn, the first `labelled` named.
    """
    points = drawable(rows)[:most]
    roof = roofs(device, points)
    if roof is None:
        return ""
    x_scale, y_scale = _scales(points, roof)
    parts = [*_axes(x_scale, y_scale)]
    drawn_roofs, taken = _roofs(roof, x_scale, y_scale)
    parts += drawn_roofs
    places = [(row, x_scale(row.op.intensity), y_scale(_attained(row)), _radius(row.share)) for row in points]
    parts += [_point(row, x, y, radius) for row, x, y, radius in places]
    parts += _roof_labels(roof, x_scale, y_scale)
    parts += _names(places, labelled, taken)
    parts += _legend({row.op.bound for row in points})
    return svg.document(WIDTH, HEIGHT, f"Roofline of {device.name}: FLOP/s attained by arithmetic intensity", parts)


def undrawn(rows: Sequence[OpRow], *, most: int = 200) -> str:
    """What the chart leaves out, in words; empty where it leaves out nothing."""
    shown = drawable(rows)
    drawn = {id(row) for row in shown}
    flat = [row for row in rows if id(row) not in drawn]
    notes = []
    if flat:
        share = text.percent(math.fsum(row.share for row in flat))
        notes.append(f"{_ops(flat)} without FLOPs ({share} of the time)")
    if len(shown) > most:
        rest = shown[most:]
        share = text.percent(math.fsum(row.share for row in rest))
        notes.append(f"the {_ops(rest)} that take least ({share} of the time)")
    return "Not drawn: " + " and ".join(notes) + "." if notes else ""


def _ops(rows: Sequence[OpRow]) -> str:
    count = sum(row.count for row in rows)
    return f"{count:,} op{'' if count == 1 else 's'}"


def _attained(row: OpRow) -> float:
    return row.op.flops / (row.op.time_us * 1e-6)


def _radius(share: float) -> float:
    return 34.0 * math.sqrt(max(share, _LEAST_SHARE))


def _scales(points: Sequence[OpRow], roof: Roofs) -> tuple[Scale, Scale]:
    """Whole decades that hold every point, every ridge and some room above the highest roof."""
    xs = [row.op.intensity for row in points] + [rate / roof.bandwidth for _, rate in roof.ceilings]
    ys = [_attained(row) for row in points] + [rate for _, rate in roof.ceilings]
    x_low, x_high = math.floor(math.log10(min(xs)) - 0.2), math.ceil(math.log10(max(xs)) + 0.2)
    y_low, y_high = math.floor(math.log10(min(ys)) - 0.2), math.log10(max(ys)) + 0.45
    return (
        Scale(10.0**x_low, 10.0**x_high, _AREA.x0, _AREA.x1, log=True),
        Scale(10.0**y_low, 10.0**y_high, _AREA.y1, _AREA.y0, log=True),
    )


def _decades(scale: Scale, most: int = 9) -> list[float]:
    low, high = math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9)
    step = max(1, math.ceil((high - low + 1) / most))
    return [10.0**power for power in range(low, high + 1, step)]


def _axes(x_scale: Scale, y_scale: Scale) -> list[str]:
    parts = []
    for value in _decades(x_scale):
        x = x_scale(value)
        parts.append(svg.line(x, _AREA.y0, x, _AREA.y1, "grid"))
        parts.append(svg.text(x, _AREA.y1 + 18, _short(value), anchor="middle", css="tick"))
    for value in _decades(y_scale):
        y = y_scale(value)
        parts.append(svg.line(_AREA.x0, y, _AREA.x1, y, "grid"))
        parts.append(svg.text(_AREA.x0 - 8, y + 4, _short(value), anchor="end", css="tick"))
    parts.append(svg.line(_AREA.x0, _AREA.y1, _AREA.x1, _AREA.y1, "axis"))
    parts.append(svg.line(_AREA.x0, _AREA.y0, _AREA.x0, _AREA.y1, "axis"))
    middle = (_AREA.x0 + _AREA.x1) / 2, (_AREA.y0 + _AREA.y1) / 2
    parts.append(svg.text(middle[0], HEIGHT - 16, "arithmetic intensity (FLOP per byte)", anchor="middle", css="label"))
    turn = f'transform="rotate(-90 18 {middle[1]:.0f})"'
    parts.append(svg.text(18, middle[1], "attained, predicted (FLOP/s)", anchor="middle", css="label", extra=turn))
    return parts


def _short(value: float) -> str:
    """`100 G`, `1,000`, `0.01`."""
    for factor, prefix in _PREFIXES:
        if value >= factor * (1 - 1e-9) and factor >= 1e6:
            return f"{value / factor:g} {prefix}"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _roofs(roof: Roofs, x_scale: Scale, y_scale: Scale) -> tuple[list[str], list[Box]]:
    """The bandwidth roof, a ceiling and a ridge per rate; and the boxes that other text must avoid."""
    parts: list[str] = []
    taken: list[Box] = []
    x0, y0, x1, y1 = _slope(roof, x_scale, y_scale)
    parts.append(svg.line(x0, y0, x1, y1, "roof"))
    steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 8))
    for step in range(steps + 1):
        x, y = x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps
        taken.append(Box(x - 4, y - 28, x + 4, y + 4))  # the line, and its label above it
    for _, rate in roof.ceilings:
        x, y = x_scale(rate / roof.bandwidth), y_scale(rate)
        parts.append(svg.line(x, y, _AREA.x1, y, "roof"))
        parts.append(svg.line(x, y, x, _AREA.y1, "ridge"))
        taken.append(Box(x, y - 3, _AREA.x1, y + 3))
    return parts, taken


def _slope(roof: Roofs, x_scale: Scale, y_scale: Scale) -> tuple[float, float, float, float]:
    """Ends of the bandwidth roof in the drawing: from the plot's edge to the highest ceiling."""
    low, high = max(x_scale.low, y_scale.low / roof.bandwidth), roof.ceilings[0][1] / roof.bandwidth
    return x_scale(low), y_scale(low * roof.bandwidth), x_scale(high), y_scale(high * roof.bandwidth)


def _roof_labels(roof: Roofs, x_scale: Scale, y_scale: Scale) -> list[str]:
    """What each roof is: along the slope, and right of the plot, where labels of close ceilings are moved apart."""
    x0, y0, x1, y1 = _slope(roof, x_scale, y_scale)
    words = f"memory roof {format_rate(roof.bandwidth, 'B/s')}"
    along = min(0.45, max(0.0, 1 - (svg.text_width(words) + 40) / max(math.hypot(x1 - x0, y1 - y0), 1.0)))
    x, y = x0 + (x1 - x0) * along, y0 + (y1 - y0) * along
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    turn = f'transform="rotate({angle:.1f} {x:.1f} {y:.1f}) translate(0 -11)"'
    parts = [svg.text(x, y, words, css="roof-label name", extra=turn)]
    pitch, lines = svg.FONT + 2, 3
    tops: list[float] = []
    for _, rate in roof.ceilings:
        tops.append(max(y_scale(rate), tops[-1] + lines * pitch + 5 if tops else 0.0))
    lifted = max(0.0, tops[-1] + lines * pitch - HEIGHT)
    for (names, rate), top in zip(roof.ceilings, tops, strict=True):
        label_y = top - lifted + 4
        parts.append(svg.line(_AREA.x1, y_scale(rate), _AREA.x1 + 10, label_y - 4, "leader"))
        parts.append(svg.text(_AREA.x1 + 14, label_y, names, css="roof-label"))
        parts.append(svg.text(_AREA.x1 + 14, label_y + pitch, format_rate(rate, "FLOP/s")))
        ridge = f"ridge {text.intensity(rate / roof.bandwidth)} FLOP/B"
        parts.append(svg.text(_AREA.x1 + 14, label_y + 2 * pitch, ridge, css="tick"))
    return parts


def _point(row: OpRow, x: float, y: float, radius: float) -> str:
    op = row.op
    moved = format_bytes(op.bytes_read + op.bytes_written)
    facts = [
        " ".join(part for part in (op.target, text.times(row.count), op.phase) if part),
        text.where(row.module, place(op.file, op.line)),
        f"{format_flops(op.flops)}, {moved}, {text.intensity(op.intensity)} FLOP/B",
        f"{text.us(op.time_us)} each, {text.percent(row.share)} of the time, {op.bound}-bound",
    ]
    tip = escape("\n".join(svg.printable(fact)[:160] for fact in facts if fact))
    return f'<g class="point fill-{op.bound}">{_shape(op.bound, x, y, radius)}<title>{tip}</title></g>'


def _shape(bound: str, x: float, y: float, radius: float) -> str:
    """A circle, square or triangle of the same area, so that bounds differ by more than colour."""
    if bound == "memory":
        half = radius * math.sqrt(math.pi) / 2
        return f'<rect x="{x - half:.1f}" y="{y - half:.1f}" width="{2 * half:.1f}" height="{2 * half:.1f}"/>'
    if bound == "launch":
        side = radius * math.sqrt(4 * math.pi / math.sqrt(3))
        height = side * math.sqrt(3) / 2
        tip, base = y - height * 2 / 3, y + height / 3
        return f'<path d="M{x:.1f} {tip:.1f}L{x + side / 2:.1f} {base:.1f}L{x - side / 2:.1f} {base:.1f}Z"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'


def _names(places: Sequence[tuple[OpRow, float, float, float]], labelled: int, taken: list[Box]) -> list[str]:
    """Names beside the largest points, each where it covers no roof, no other name and no large point; else none."""
    solid = [Box(x - r, y - r, x + r, y + r) for _, x, y, r in places if r >= 5]
    parts = []
    for row, x, y, radius in places[:labelled]:
        words = _name(row)
        width, height = svg.text_width(words), svg.FONT
        for dx, dy in ((1, 0), (-1, 0), (0.6, 1), (0.6, -1), (-0.6, 1), (-0.6, -1)):
            gap = radius + 5
            x0 = x + dx * gap if dx > 0 else x + dx * gap - width
            middle = y + dy * (gap + height / 2)
            box = Box(x0, middle - height / 2 - 1, x0 + width, middle + height / 2 + 1)
            if box.within(_AREA) and not any(box.overlaps(other) for other in (*taken, *solid)):
                taken.append(box)
                parts.append(svg.text(box.x0, middle + 4, words, css="name"))
                break
    return parts


def _name(row: OpRow) -> str:
    """`mm lm_head` from `aten.mm.default` in `lm_head`."""
    parts = row.op.target.split(".")
    short = parts[1] if len(parts) == 3 else parts[-1]
    words = f"{short} {row.module}".strip() + (" bwd" if row.op.phase == "backward" else "")
    return words if len(words) <= _LABEL_WIDTH else words[: _LABEL_WIDTH - 3] + "..."


def _legend(bounds: set[str]) -> list[str]:
    """Shapes and colours of the bounds that occur, and what the size means, in one row above the plot."""
    parts = []
    x = _AREA.x0
    for bound, words in _LEGEND:
        if bound in bounds:
            parts.append(f'<g class="point fill-{bound}">{_shape(bound, x + 6, 22, 6)}</g>')
            parts.append(svg.text(x + 18, 26, words, css="legend"))
            x += 18 + svg.text_width(words) + 18
    words = "area: share of time"
    parts.append(svg.text(x + 8, 26, words, css="legend"))
    x += 8 + svg.text_width(words) + 16
    for share, label in ((_LEAST_SHARE, f"{_LEAST_SHARE:.0%} or less"), (0.1, "10%")):
        radius = _radius(share)
        parts.append(f'<circle cx="{x + radius:.1f}" cy="22" r="{radius:.1f}" class="size-key"/>')
        parts.append(svg.text(x + 2 * radius + 5, 26, label, css="legend"))
        x += 2 * radius + 5 + svg.text_width(label) + 12
    return parts
