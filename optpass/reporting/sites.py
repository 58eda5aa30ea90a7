"""The sites of a report by kind: alike ones of repeated layers as one row, with their figures added up. No rendering.

What a site is and says is decided by the pass that files it; nothing here knows any pass. Figures are read by their
keys alone: `unfused_us` and `fused_us` (also with `measured_` before) are a time before and after, a key with `bytes`
in it is bytes, `_us` and `_s` are durations, `gain` is a ratio of times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from optpass.reporting.model import Analysis, Report, Site
from optpass.reporting.summary import general
from optpass.units import format_bytes, format_seconds

#: Keys of `Site.cost` whose sum has no meaning.
_RATIOS = frozenset({"gain", "measured_gain"})
_NUMBER = re.compile(r"_\d+$")
_PHRASES = {"bytes_not_saved": "{} no longer saved for the backward"}


@dataclass(frozen=True)
class SiteRow:
    """Sites that are alike (same pass, line, words, and module but for numbers in it), as in repeated layers.

    Attributes:
        name: the pass.
        site: the first of them.
        count: how many there are, over all graphs and processes.
        modules: their module paths in words, `blocks.0.attn ... blocks.11.attn`.
        nodes: their FX nodes in words.
        cost: their figures together; see `together`.
    """

    name: str
    site: Site
    count: int
    modules: str
    nodes: str
    cost: dict[str, float]

    @property
    def figures(self) -> str:
        """Their figures in words, and that they are sums where there are several sites."""
        words = figures(self.cost)
        return f"together {words}" if words and self.count > 1 else words


@dataclass(frozen=True)
class ReasonRow:
    """Sites that were left alone for one reason."""

    reason: str
    count: int
    rows: tuple[SiteRow, ...]


@dataclass(frozen=True)
class KindRow:
    """All sites of one kind, `cost` being the figures of those applied."""

    kind: str
    applied: tuple[SiteRow, ...]
    declined: tuple[ReasonRow, ...]
    applied_count: int
    declined_count: int
    cost: dict[str, float]

    @property
    def title(self) -> str:
        """`attention: 12 sites applied, 2 declined`."""
        plural = "" if self.applied_count == 1 else "s"
        declined = f", {self.declined_count} declined" if self.declined_count else ""
        return f"{self.kind}: {self.applied_count} site{plural} applied{declined}"


@dataclass(frozen=True)
class _Filed:
    """A site and where it was filed."""

    site: Site
    name: str
    process: int


def by_kind(report: Report | Analysis) -> list[KindRow]:
    """Every site, by kind in the order in which kinds first occur; declined ones by reason, most frequent first."""
    applied: dict[str, list[_Filed]] = {}
    declined: dict[str, list[_Filed]] = {}
    for graph in report.graphs:
        for record in graph.passes:
            for group, sites in ((applied, record.applied), (declined, record.declined)):
                for site in sites:
                    applied.setdefault(site.kind, [])
                    group.setdefault(site.kind, []).append(_Filed(site, record.name, graph.process))
    return [
        KindRow(
            kind=kind,
            applied=tuple(_rows(mine)),
            declined=_reasons(declined.get(kind, [])),
            applied_count=len(mine),
            declined_count=len(declined.get(kind, [])),
            cost=together(mine),
        )
        for kind, mine in applied.items()
    ]


def _reasons(filed: Sequence[_Filed]) -> tuple[ReasonRow, ...]:
    found: dict[tuple[str, str], list[_Filed]] = {}
    for item in filed:
        found.setdefault((item.name, item.site.reason), []).append(item)
    rows = [ReasonRow(reason, len(mine), tuple(_rows(mine))) for (_, reason), mine in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.count))


def _rows(filed: Iterable[_Filed]) -> list[SiteRow]:
    """Alike sites as one row, in the order in which they were filed."""
    found: dict[tuple[object, ...], list[_Filed]] = {}
    for item in filed:
        site = item.site
        words = (site.before, site.after, site.reason)
        places = (site.file, site.line, site.node_file, site.node_line)
        found.setdefault((item.name, *places, general(site.module), *words), []).append(item)
    return [
        SiteRow(
            name=same[0].name,
            site=same[0].site,
            count=len(same),
            modules=in_words([item.site.module or "" for item in same], general),
            nodes=in_words([item.site.node for item in same], lambda node: _NUMBER.sub("", node)),
            cost=together(same),
        )
        for same in found.values()
    ]


def in_words(names: Sequence[str], stem: Callable[[str], str], most: int = 3) -> str:
    """Names in few words: one or two as they are, a series by its ends, others by the first few and how many more.

    >>> in_words(["h.0.attn", "h.1.attn", "h.2.attn"], general)
    'h.0.attn ... h.2.attn'
    """
    distinct = [name for name in dict.fromkeys(names) if name]
    if len(distinct) > 2 and len({stem(name) for name in distinct}) == 1:
        return f"{distinct[0]} ... {distinct[-1]}"
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


def together(filed: Sequence[_Filed]) -> dict[str, float]:
    """Figures of several sites: sums; over several processes, durations are those of the slowest one.

    A ratio is kept where it is the same for all, and left out otherwise.
    """
    result: dict[str, float] = {}
    for key in dict.fromkeys(key for item in filed for key in item.site.cost):
        known = [(item.process, item.site.cost[key]) for item in filed if key in item.site.cost]
        values = [value for _, value in known]
        if key in _RATIOS:
            if len(set(values)) == 1:
                result[key] = values[0]
        elif key.endswith(("_us", "_s")):
            processes = {process for process, _ in known}
            result[key] = max(math.fsum(value for p, value in known if p == process) for process in processes)
        else:
            result[key] = math.fsum(values)
    return result


def figures(cost: dict[str, float]) -> str:
    """Figures in words: `128 MiB no longer saved for the backward, 1.5 ms -> 500 us predicted (3 times as fast)`."""
    rest, times = dict(cost), []
    for prefix, word in (("", "predicted"), ("measured_", "measured")):
        if (before := f"{prefix}unfused_us") in rest and (after := f"{prefix}fused_us") in rest:
            times.append(_times(rest.pop(before), rest.pop(after), word))
            rest.pop(f"{prefix}gain", None)
    return ", ".join([*(_figure(key, value) for key, value in rest.items()), *times])


def _times(before: float, after: float, word: str) -> str:
    ratio = f" ({before / after:.3g} times as fast)" if before > 0 and after > 0 else ""
    return f"{format_seconds(before * 1e-6)} -> {format_seconds(after * 1e-6)} {word}{ratio}"


def _figure(key: str, value: float) -> str:
    """`nodes removed: 2`, `bytes saved: 12 MiB`, `launch: 3 us`."""
    if key in _RATIOS:
        return f"{value:.3g} times as fast" + (", measured" if key.startswith("measured") else "")
    if "bytes" in key.split("_"):
        shown = format_bytes(value)
    elif key.endswith(("_us", "_s")):
        key, _, unit = key.rpartition("_")
        shown = format_seconds(value * (1e-6 if unit == "us" else 1))
    else:
        shown = f"{value:.4g}"
    return _PHRASES[key].format(shown) if key in _PHRASES else f"{key.replace('_', ' ')}: {shown}"
