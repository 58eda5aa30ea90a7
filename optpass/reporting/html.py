"""The page: one offline HTML file under 300 KB, readable without JavaScript. The words come from `summary` and `text`.

The templates only lay out what is put together here. Everything in them is escaped but the SVG, which escapes itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from optpass.reporting import sites, summary, text
from optpass.reporting.audit import brief
from optpass.reporting.files import Path_, write_text
from optpass.reporting.model import Analysis, Report
from optpass.reporting.svg import loss_chart, share_bar
from optpass.reporting.svg_roofline import roofline_chart, undrawn
from optpass.reporting.training import other_facts, read_training, training_facts
from optpass.units import format_bytes, format_flops, format_seconds

LIMIT_BYTES = 300_000
_ROWS = 200  # rows per table at first; halved until the page fits
_CLIP = 600  # characters of one text


@dataclass(frozen=True)
class Rows:
    """The first rows of a table, and how many are left out."""

    shown: tuple[Any, ...]
    left_out: int


def render_html(obj: Report | Analysis) -> str:
    """The page as text, at most `LIMIT_BYTES` long in UTF-8: tables are cut, and say by how much, until it fits."""
    tables = _tables(obj)
    rows = _ROWS
    while True:
        page = _page(obj, tables, rows)
        if len(page.encode()) <= LIMIT_BYTES or rows == 1:
            return page
        rows = max(1, rows // 2)


def write_html(obj: Report | Analysis, path: Path_) -> None:
    """Write the page, atomically; parent folders are made.

    Raises:
        ReportError: the path cannot be written; nothing is left behind.
    """
    write_text(render_html(obj), path)


def _page(obj: Report | Analysis, tables: dict[str, Sequence[Any]], rows: int) -> str:
    template = environment().get_template("analysis.html.j2" if isinstance(obj, Analysis) else "report.html.j2")
    context = _roofline(obj, tables, rows)
    context |= _analysis(obj, rows) if isinstance(obj, Analysis) else _report(obj, tables, rows)
    return template.render(obj=obj, **context)


def _tables(obj: Report | Analysis) -> dict[str, Sequence[Any]]:
    """Every table in full."""
    return {
        "ops": summary.rank_ops(obj.ops),
        "groups": summary.rank_groups(obj.groups),
        "modules": summary.hot_modules(obj.ops),
        "misaligned": summary.misaligned(obj.ops),
        "unknown": list(obj.unknown_ops.items()),
        "graphs": obj.graphs,
        "passes": summary.pass_rows(obj),
        "kinds": sites.by_kind(obj),
    }


def environment() -> Environment:
    """Jinja2 with the templates, filters and names that every page uses; everything is escaped."""
    environment = Environment(
        loader=PackageLoader("optpass.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "flops": format_flops,
        "bytes": format_bytes,
        "us": text.us,
        "seconds": text.seconds,
        "percent": text.percent,
        "times": text.times,
        "intensity": text.intensity,
        "aligned": text.aligned,
        "mode": text.mode,
        "figures": sites.figures,
        "clip": clip,
    }
    environment.globals |= {"place": summary.place, "where": text.where, "change": text.change}
    return environment


def clip(value: str) -> str:
    """Text of at most some hundred characters; a longer one says how much of it is left out."""
    return value if len(value) <= _CLIP else f"{value[:_CLIP]}... ({len(value) - _CLIP} more characters)"


def cut(rows: Iterable[Any], most: int) -> Rows:
    """The first rows, and how many are left out."""
    every = tuple(rows)
    return Rows(every[:most], max(len(every) - most, 0))


def _roofline(obj: Report | Analysis, tables: dict[str, Sequence[Any]], rows: int) -> dict[str, Any]:
    """What both pages show: figures, charts, and the tables cut to so many rows."""
    ranked = tables["ops"]
    shares = summary.bound_shares(obj)
    # Markup: the SVG functions escape every text that they are given.
    chart = Markup(roofline_chart(obj.device, ranked, most=rows)) if obj.device is not None else Markup("")
    many = isinstance(obj, Report) and len({graph.process for graph in obj.graphs}) > 1
    return {
        "many_processes": many,
        "over": " over all processes" if many else "",
        "subtitle": text.subtitle(obj),
        "device": text.device_line(obj.device) if obj.device is not None else "",
        "has_roofline": bool(obj.ops or obj.groups),
        "totals": text.total_facts(obj),
        "totals_note": text.totals_note(obj),
        "cards": _cards(obj),
        "chart": chart,
        "chart_note": undrawn(ranked, most=rows),
        "bounds": shares,
        "bound_bar": Markup(share_bar(shares, "Share of the predicted time by bound")) if shares else Markup(""),
    } | {name: cut(every, rows) for name, every in tables.items()}


def _cards(obj: Report | Analysis) -> list[tuple[str, str, str]]:
    """(value, what it is, more of it) of the figures that matter most."""
    totals = obj.totals
    cards = []
    if isinstance(obj, Report):
        cost = obj.compile
        cards.append((str(cost.graphs), "graphs compiled", f"{format_seconds(cost.t_compile_s)} compiling"))
    if obj.ops or obj.groups:
        cards += [
            (text.us(totals.time_us), "predicted time", f"{text.us(totals.time_unfused_us)} before fusion"),
            (format_flops(totals.flops), "work", "a multiply-add counts as 2"),
            (format_bytes(totals.bytes_fused), "memory traffic", f"{format_bytes(totals.bytes_unfused)} before fusion"),
            (f"{totals.kernels:,}", "kernels", "after fusion"),
            (text.percent(totals.mfu) if totals.mfu else "not known", "predicted MFU", "share of the dense peak"),
        ]
    return cards


def _analysis(analysis: Analysis, rows: int) -> dict[str, Any]:
    return {"title": f"{analysis.target}: analysis", "notes": cut(analysis.notes, rows)}


def _report(report: Report, tables: dict[str, Sequence[Any]], rows: int) -> dict[str, Any]:
    run = read_training(report.training)
    return {
        "title": f"{report.name or 'compile'}: report",
        "cost": text.cost_facts(report),
        "cost_note": text.cost_note(report),
        "kinds": cut(((k, cut(k.applied, rows), cut(k.declined, rows)) for k in tables["kinds"]), rows),
        "training": training_facts(report.training),
        "audit": brief.headline(report.audit) if report.audit is not None else "",
        "findings": cut(brief.rows(report.audit) if report.audit is not None else (), rows),
        "loss": Markup(loss_chart(run.loss, run.eager)),
        "facts": [
            ("Training setup", cut(other_facts(report.training), rows)),
            ("Environment", cut(report.environment.items(), rows)),
            ("Options", cut(_plain(report.options), rows)),
            ("Processes", cut(_processes(report), rows)),
        ],
        "warnings": cut(report.warnings, rows),
    }


def _plain(options: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k, v if isinstance(v, str) else json.dumps(v, default=str)) for k, v in options.items()]


def _processes(report: Report) -> Sequence[tuple[str, str]]:
    return [
        (f"rank {p.rank} of {p.world_size}", f"pid {p.pid} on {p.host}: {' '.join(p.argv)}".rstrip(": "))
        for p in report.processes
    ]
