"""What every view of an audit says, in one wording: counts, places, costs, breaks with what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optpass.reporting.audit.model import Audit, Break, BreakCost, FunctionRecord, Recompile, SilentEager
from optpass.reporting.audit.source import place
from optpass.reporting.text import percent
from optpass.units import format_bytes, format_seconds

_GUARDS = 3  # guards of a recompile that are told
_VALUES = 8  # values seen that are told


@dataclass(frozen=True)
class Chain:
    """A break and the breaks that only follow from it."""

    number: int
    record: Break
    followers: tuple[Break, ...]


def chains(audit: Audit) -> list[Chain]:
    """Breaks in their order of cost, each with all that follow from it, also by way of others."""
    followers: dict[int, list[Break]] = {}
    roots = []
    for index, record in enumerate(audit.breaks):
        top = _root_of(audit.breaks, index)
        if top == index:
            roots.append(index)
        else:
            followers.setdefault(top, []).append(record)
    return [Chain(n, audit.breaks[i], tuple(followers.get(i, ()))) for n, i in enumerate(roots, 1)]


def _root_of(breaks: Sequence[Break], index: int) -> int:
    seen = {index}
    while (parent := breaks[index].caused_by) is not None and parent not in seen and 0 <= parent < len(breaks):
        index = parent
        seen.add(index)
    return index


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 graph break`, `2 graph breaks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def headline(audit: Audit) -> str:
    """`3 graph breaks, 2 recompiles, 1 function runs eager; 9 graphs hold 87% of the operations`."""
    summary = audit.summary
    eager = count(summary.silent_eager, "function runs eager", "functions run eager")
    text = f"{count(summary.breaks, 'graph break')}, {count(summary.recompiles, 'recompile')}, {eager}"
    text += f"; {count(summary.graphs, 'graph')}"
    if summary.ops_captured_fraction is not None:
        text += f" with {percent(summary.ops_captured_fraction)} of the tensor operations"
    if summary.t_first_s is not None:
        text += f"; first calls {format_seconds(summary.t_first_s)}"
    if summary.t_steady_s is not None:
        text += f", steady calls {format_seconds(summary.t_steady_s)}"
    return text


def subtitle(audit: Audit) -> str:
    """When and with what, and over how many processes."""
    parts = [audit.created, *(f"{n} {audit.environment[n]}" for n in ("torch", "python") if n in audit.environment)]
    if len(audit.processes) > 1:
        parts.append(count(len(audit.processes), "process", "processes"))
    return ", ".join(part for part in parts if part)


def kind(record: Break) -> str:
    """`GB0170 Data-dependent branching`."""
    return f"{record.gb_id} {record.gb_type}" if record.gb_id else record.gb_type


_EFFECTS = {
    "rest eager": "the rest of the function runs eager",
    "frame eager": "the whole function runs eager",
    "error": "it was raised to the program",
}


def effect(record: Break) -> str:
    """What became of the function; empty where it simply goes on in another graph."""
    return _EFFECTS.get(record.effect, "")


def where(record: Break, root: str) -> str:
    """`train.py:12:9 in Block.forward (blocks.0)`, with the user's line where the break itself is in other code."""
    text = place(record.file, record.line, root, record.column)
    text += f" in {record.function}" if record.function else ""
    text += f" ({record.module})" if record.module else ""
    if record.owner != "user":
        led = place(record.user_file, record.user_line, root)
        text += f", {record.owner} code" + (f" reached from {led}" if led else "")
    return text


def where_function(record: Recompile | SilentEager | FunctionRecord, root: str) -> str:
    """`train.py:12 in Block.forward`."""
    at = place(record.file, record.line, root)
    return " in ".join(part for part in (at, record.function) if part) or "the whole process"


def cost(figures: BreakCost) -> str:
    """`1.2 MiB cross the boundary, 120 us of fusion lost per call, 1.3 s compiling what is behind it`; may be empty."""
    parts = []
    if figures.boundary_bytes:
        parts.append(f"{format_bytes(figures.boundary_bytes)} across the boundary per call")
    if figures.fusion_lost_us:
        parts.append(f"{format_seconds(figures.fusion_lost_us * 1e-6)} of fusion lost per call (predicted)")
    if figures.compile_s:
        parts.append(f"{format_seconds(figures.compile_s)} compiling what is behind it")
    if figures.guard_us:
        parts.append(f"{format_seconds(figures.guard_us * 1e-6)} of guards per call (cold caches)")
    return ", ".join(parts)


def changed(record: Recompile) -> str:
    """`shape of x: x.size(1) 8 -> 16`, as much of it as is known."""
    values = f"{record.before or '?'} -> {record.after or '?'}" if record.before or record.after else ""
    text = " ".join(part for part in (record.source, values) if part)
    return f"{record.cause}: {text}" if text else record.cause


def recompile_facts(record: Recompile) -> Iterator[tuple[str, str]]:
    """(name, value) of what else is known of a recompile."""
    if len(record.values) > 2:
        more = f", ... ({len(record.values)} in all)" if len(record.values) > _VALUES else ""
        yield "seen", ", ".join(record.values[:_VALUES]) + more
    if record.guards:
        more = f"; and {len(record.guards) - _GUARDS} more" if len(record.guards) > _GUARDS else ""
        yield "guards", "; ".join(record.guards[:_GUARDS]) + more
    if record.seconds:
        yield "cost", f"{format_seconds(record.seconds)} compiling"


def silent(record: SilentEager) -> str:
    """`recompile limit, 12 calls ran eager since`."""
    return record.kind + (f", {count(record.calls, 'call')} ran eager since" if record.calls is not None else "")


def verdict(verified: bool | None, outcome: str) -> str:
    """What trying a fix showed; empty where it was not tried."""
    if outcome or verified is None:
        return outcome
    return "tried on a copy: the break is gone and outputs are equal" if verified else "tried on a copy: does not help"


def function_rows(audit: Audit) -> list[tuple[str, ...]]:
    """Compiled functions, those that took longest to compile first, as text cells."""
    ranked = sorted(audit.functions, key=lambda f: (-f.compile_s, f.file, f.line))
    return [
        (
            f.function, place(f.file, f.line, audit.root), str(f.graphs), str(f.compiles),
            percent(f.ops_captured / f.ops_total) if f.ops_total else "-",
            *(format_seconds(v) if v is not None else "-" for v in (f.compile_s, f.t_first_s, f.t_steady_s)),
            str(f.calls),
        )
        for f in ranked
    ]  # fmt: skip


FUNCTION_COLUMNS = (
    "function", "line", ">graphs", ">compiles", ">ops captured", ">compile", ">first call", ">steady call", ">calls",
)  # fmt: skip
