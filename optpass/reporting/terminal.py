"""The report and the analysis in the terminal. What is said comes from `summary` and `text`; `layout` lays it out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from optpass.reporting import layout, summary, text
from optpass.reporting.audit import brief
from optpass.reporting.model import Analysis, GraphRecord, Op, Report
from optpass.reporting.terminal_sites import render_sites
from optpass.reporting.training import training_facts
from optpass.units import format_bytes, format_flops, format_seconds

_STYLES = {"compute": "green", "memory": "yellow", "launch": "magenta", "unknown": "red", "none": "dim"}
_Cells = list[str | Text]


def render_analysis(analysis: Analysis, console: Console, *, top: int = 10) -> None:
    """Print an analysis: header, totals, hottest ops and modules, misaligned matmuls, unknown ops, notes.

    Args:
        top: rows per table; how many are left out is said below it.
    """
    layout.title(console, f"optpass analysis: {analysis.target}", text.subtitle(analysis))
    layout.say(console, f"device: {text.device_line(analysis.device)}")
    _roofline(console, analysis, top)
    _unknown(console, analysis)
    layout.listed(console, "Notes", analysis.notes)


def render_report(report: Report, console: Console, *, top: int = 10) -> None:
    """Print a report: compile cost, training, graphs, passes, sites applied and declined, roofline, warnings.

    Args:
        top: rows per table; how many are left out is said below it.
    """
    layout.title(console, "optpass report" + (f": {report.name}" if report.name else ""), text.subtitle(report))
    if report.device is not None:
        layout.say(console, f"device: {text.device_line(report.device)}")
    layout.heading(console, "Compile cost", text.cost_note(report))
    layout.pairs(console, text.cost_facts(report))
    if facts := training_facts(report.training):
        layout.heading(console, "Training")
        layout.pairs(console, facts)
    _graphs(console, report.graphs, top)
    _audit(console, report, top)
    _passes(console, report)
    render_sites(report, console, top=top)
    if report.ops or report.groups:
        _roofline(console, report, top)
    _unknown(console, report)
    layout.listed(console, "Warnings", report.warnings, style="yellow")


def _roofline(console: Console, obj: Analysis | Report, top: int) -> None:
    layout.heading(console, "Totals, predicted", text.totals_note(obj))
    layout.pairs(console, text.total_facts(obj))
    _ops(console, obj.ops, top)
    _modules(console, obj.ops, top)
    _misaligned(console, obj.ops, top)


def _ops(console: Console, ops: Sequence[Op], top: int) -> None:
    rows = summary.rank_ops(ops)
    if not rows:
        return
    layout.heading(console, "Top ops", "by predicted time, each as its own kernel; identical ops in one row")
    if layout.is_wide(console):
        names = ("op", "count", "phase", "module", "line", ">FLOPs", ">bytes", ">FLOP/B", "bound", "aligned")
        layout.table(console, (*names, ">time", ">share"), (_op_cells(row) for row in rows[:top]))
    else:
        layout.table(console, ("op", ">FLOPs, bytes", "bound", ">time"), (_op_cells_narrow(row) for row in rows[:top]))
    layout.more(console, top, len(rows), "rows")


def _op_cells(row: summary.OpRow) -> _Cells:
    op = row.op
    return [
        op.target,
        text.times(row.count),
        op.phase,
        row.module,
        summary.place(op.file, op.line),
        format_flops(op.flops * row.count),
        format_bytes((op.bytes_read + op.bytes_written) * row.count),
        text.intensity(op.intensity),
        _bound(op.bound),
        Text(text.aligned(op), style="red" if op.aligned is False else ""),
        text.us(row.time_us),
        text.percent(row.share),
    ]


def _op_cells_narrow(row: summary.OpRow) -> _Cells:
    op = row.op
    name = " ".join(part for part in (op.target, text.times(row.count)) if part)
    misaligned = f"aligned: {text.aligned(op)}" if op.aligned is False else ""
    return [
        layout.lines(
            name + (" (backward)" if op.phase == "backward" else ""),
            layout.text(row.module, "dim"),
            layout.text(summary.place(op.file, op.line), "dim"),
            layout.text(misaligned, "red"),
        ),
        layout.lines(format_flops(op.flops * row.count), format_bytes((op.bytes_read + op.bytes_written) * row.count)),
        layout.lines(_bound(op.bound), f"{text.intensity(op.intensity)} FLOP/B"),
        layout.lines(text.us(row.time_us), text.percent(row.share)),
    ]


def _bound(bound: str) -> Text:
    return Text(bound, style=_STYLES.get(bound, ""))


def _modules(console: Console, ops: Sequence[Op], top: int) -> None:
    rows = summary.hot_modules(ops)
    if len(rows) < 2:
        return
    layout.heading(console, "Hot modules", "time of their ops, each as its own kernel; repeated layers together")
    cells = (
        (
            row.module,
            text.times(row.instances),
            str(row.ops),
            format_flops(row.flops),
            format_bytes(row.bytes),
            text.us(row.time_us),
            text.percent(row.share),
        )
        for row in rows[:top]
    )
    layout.table(console, ("module", "count", ">ops", ">FLOPs", ">bytes", ">time", ">share"), cells)
    layout.more(console, top, len(rows), "modules")


def _misaligned(console: Console, ops: Sequence[Op], top: int) -> None:
    rows = summary.misaligned(ops)
    if not rows:
        return
    layout.heading(console, "Misaligned matmuls", "sizes that do not fit the Tensor Cores")
    wide = layout.is_wide(console)
    cells: list[_Cells] = []
    for row in rows[:top]:
        backward = "(backward)" if row.op.phase == "backward" else ""
        name = " ".join(part for part in (row.op.target, text.times(row.count), backward) if part)
        place = summary.place(row.op.file, row.op.line)
        mnk = " x ".join(map(str, row.op.mnk or ()))
        first: _Cells = [name, row.module, place, row.op.dtype] if wide else [
            layout.lines(name, layout.text(text.where(row.module, place), "dim"))
        ]  # fmt: skip
        cells.append([*first, mnk, row.advice, text.us(row.time_us)])
    names = ("op", "module", "line", "dtype") if wide else ("op",)
    layout.table(console, (*names, "M x N x K", "what to do", ">time"), cells)
    layout.more(console, top, len(rows), "shapes")


def _unknown(console: Console, obj: Analysis | Report) -> None:
    if obj.unknown_ops:
        layout.heading(console, "Ops without a FLOP formula", "their FLOPs are NOT in the totals")
        layout.table(console, ("op", ">count"), ([name, str(count)] for name, count in obj.unknown_ops.items()))


def _graphs(console: Console, graphs: Sequence[GraphRecord], top: int) -> None:
    if not graphs:
        layout.say(console, "no graph was compiled")
        return
    layout.heading(console, "Graphs")
    if layout.is_wide(console):
        names = ("id", "function", "mode", "inner", "cache", ">nodes", ">compile", ">passes", ">first", ">steady")
        layout.table(console, (*names, ">calls"), (_graph_cells(graph) for graph in graphs[:top]))
    else:
        narrow = ("id", "function", ">nodes", ">compile", ">first", ">steady")
        layout.table(console, narrow, (_graph_cells_narrow(graph) for graph in graphs[:top]))
    layout.more(console, top, len(graphs), "graphs")


def _graph_cells(graph: GraphRecord) -> _Cells:
    return [
        graph.id,
        graph.function,
        text.mode(graph),
        graph.inner,
        graph.cache,
        str(graph.nodes),
        format_seconds(graph.t_compile_s),
        format_seconds(graph.t_passes_s),
        text.seconds(graph.t_first_s),
        text.seconds(graph.t_steady_s),
        str(graph.calls),
    ]


def _graph_cells_narrow(graph: GraphRecord) -> _Cells:
    served = (text.mode(graph), graph.inner, f"cache {graph.cache}" if graph.cache else "")
    return [
        graph.id,
        layout.lines(graph.function, layout.text(", ".join(part for part in served if part), "dim")),
        str(graph.nodes),
        format_seconds(graph.t_compile_s),
        text.seconds(graph.t_first_s),
        text.seconds(graph.t_steady_s),
    ]


def _audit(console: Console, report: Report, top: int) -> None:
    if report.audit is None:
        return
    layout.heading(console, "Graph breaks and recompiles", "the whole, with fixes: optpass audit")
    layout.say(console, brief.headline(report.audit))
    rows = brief.rows(report.audit)
    layout.pairs(console, rows[:top])
    layout.more(console, top, len(rows), "findings")


def _passes(console: Console, report: Report) -> None:
    rows = summary.pass_rows(report)
    if not rows:
        return
    layout.heading(console, "Passes")
    cells = ([r.name, r.stage, str(r.graphs), format_seconds(r.seconds), str(r.applied), str(r.declined)] for r in rows)
    layout.table(console, ("pass", "stage", ">graphs", ">time", ">applied", ">declined"), cells)
    for row in rows:
        for error in row.errors:
            layout.say(console, f"{row.name} failed and was undone: {error}", "red")
