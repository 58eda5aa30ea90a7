"""Figures and records as words, the same in the terminal and on the page. No layout, no colour, no markup."""

from __future__ import annotations

from optpass.reporting import summary
from optpass.reporting.model import Analysis, DeviceRecord, GraphRecord, Op, Report
from optpass.units import format_bytes, format_flops, format_rate, format_seconds


def us(value: float) -> str:
    """Microseconds in the unit that keeps three figures."""
    return format_seconds(value * 1e-6)


def seconds(value: float | None) -> str:
    """A duration, or `-` where it was not measured."""
    return "-" if value is None else format_seconds(value)


def percent(share: float) -> str:
    """`12.3%`; a share below 0.1% is not shown as zero."""
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def times(count: int) -> str:
    """`x12`, and nothing for one."""
    return f"x{count}" if count > 1 else ""


def intensity(value: float) -> str:
    """FLOPs per byte to three figures, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def device_line(device: DeviceRecord) -> str:
    """`NVIDIA H200 (h200), from its datasheet; attainable: 4.10 TB/s, bfloat16 791 TFLOP/s`."""
    origin = "measured on this machine" if device.calibrated else "from its datasheet"
    figures = [format_rate(device.attainable_bandwidth, "B/s")] if device.attainable_bandwidth else []
    figures += [f"{dtype} {format_rate(rate, 'FLOP/s')}" for dtype, rate in device.attainable_flops.items()]
    return f"{device.name} ({device.key}), {origin}" + (f"; attainable: {', '.join(figures)}" if figures else "")


def subtitle(obj: Analysis | Report) -> str:
    """What kind of thing was analysed, or which run it was."""
    if isinstance(obj, Analysis):
        mode = "training step (forward and backward)" if obj.train else "forward only"
        facts = [mode, obj.dtype, f"{obj.parameters:,} parameters" if obj.parameters else ""]
    else:
        count = len(obj.processes)
        facts = [obj.created, f"run {obj.run_id}" if obj.run_id else "", f"{count} processes" if count > 1 else ""]
    return ", ".join(fact for fact in facts if fact)


def total_facts(obj: Analysis | Report) -> list[tuple[str, str]]:
    """Name and value of each total."""
    totals = obj.totals
    flops = format_flops(totals.flops)
    if totals.flops_backward:
        flops += f" (forward {format_flops(totals.flops_forward)}, backward {format_flops(totals.flops_backward)})"
    rows = [
        ("FLOPs", flops),
        ("bytes", f"{format_bytes(totals.bytes_unfused)} unfused -> {format_bytes(totals.bytes_fused)} fused"),
        ("time", f"{us(totals.time_unfused_us)} unfused -> {us(totals.time_us)} fused"),
        ("kernels", f"{totals.kernels:,} after fusion"),
        ("MFU", percent(totals.mfu) if totals.mfu else "not known"),
    ]
    shares = ", ".join(f"{share.bound} {percent(share.share)}" for share in summary.bound_shares(obj))
    return [*rows, ("time bound by", shares)] if shares else rows


def totals_note(obj: Analysis | Report) -> str:
    """What the totals are sums of, where that needs saying."""
    notes = ["sum over graphs, each run once"] if len(obj.graphs) > 1 else []
    if isinstance(obj, Report) and len({graph.process for graph in obj.graphs}) > 1:
        notes.append("times are the slowest process's")
    return "; ".join(notes)


def cost_facts(report: Report) -> list[tuple[str, str]]:
    """Name and value of each figure of the compile cost."""
    cost = report.compile
    return [
        ("graphs", str(cost.graphs)),
        ("compiling", f"{format_seconds(cost.t_compile_s)}, of which optpass's passes {seconds(cost.t_passes_s)}"),
        ("first calls", f"{seconds(cost.t_first_s)}, compiling included" if cost.t_first_s else "not measured"),
        ("steady calls", f"{seconds(cost.t_steady_s)}, forward" if cost.t_steady_s else "not measured"),
    ]


def cost_note(report: Report) -> str:
    """Whose compile cost it is, where there are several processes."""
    return "sums of the slowest process" if len(report.processes) > 1 else ""


def mode(graph: GraphRecord) -> str:
    """`training, dynamic`."""
    return ("training" if graph.training else "inference") + (", dynamic" if graph.dynamic else "")


def aligned(op: Op) -> str:
    """`yes`, `no N=50257`, or `-` where there is no matmul."""
    if op.aligned is None:
        return "-"
    dims = " ".join(f"{name}={size}" for name, size in summary.offending(op))
    return "yes" if op.aligned else f"no {dims}".strip()


def where(module: str | None, place: str) -> str:
    """Module path and source line, whichever is known."""
    return " ".join(part for part in (module, place) if part)


def change(before: str, after: str) -> str:
    """`mm + add -> addmm`."""
    return f"{before or 'nothing'} -> {after or 'removed'}"
