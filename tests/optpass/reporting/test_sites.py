"""Sites by kind: what counts as alike, how figures add up, and how both are said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optpass.reporting.model import GraphRecord, PassRecord, Report, Site
from optpass.reporting.sites import by_kind, figures, in_words
from optpass.reporting.summary import general


def site(**fields: Any) -> Site:
    return Site(**({"kind": "k", "reason": "r", "file": "a.py", "line": 1, "module": "h.0"} | fields))


def report(*graphs: dict[str, list[Site]]) -> Report:
    return Report(
        graphs=[
            GraphRecord(id=str(i), process=i, passes=[PassRecord(name="p", stage="dynamo", **sites)])
            for i, sites in enumerate(graphs)
        ]
    )


def test_alike_sites_are_one_row(attention_report: Report) -> None:
    redundant, attention = by_kind(attention_report)
    assert (redundant.title, attention.title) == (
        "redundant: 4 sites applied, 2 declined", "attention: 24 sites applied, 26 declined",
    )  # fmt: skip
    (row,) = redundant.applied
    assert (row.name, row.count, row.modules, row.site.line) == ("redundant", 4, "blocks.0.attn, blocks.1.attn", 47)
    (row,) = attention.applied
    assert (row.count, row.modules, row.nodes) == (24, "blocks.0.attn ... blocks.11.attn", "matmul_1 ... matmul_23")
    returned, costly = attention.declined
    assert (returned.reason, returned.count, len(returned.rows)) == ("the probabilities are returned", 24, 1)
    assert (costly.count, costly.rows[0].nodes) == (2, "bmm_1")


@pytest.mark.parametrize(
    "other", [{"line": 2}, {"file": "b.py"}, {"module": "g.0"}, {"before": "x"}, {"after": "x"}, {"reason": "x"}]
)
def test_what_differs_is_a_row_of_its_own(other: dict[str, Any]) -> None:
    (kind,) = by_kind(report({"applied": [site(), site(module="h.1"), site(**other)]}))
    assert [row.count for row in kind.applied] == [2, 1]


def test_kinds_come_in_the_order_in_which_they_are_filed() -> None:
    made = report({"declined": [site(kind="b")]}, {"applied": [site(kind="a"), site(kind="b")]})
    assert [kind.title for kind in by_kind(made)] == ["b: 1 site applied, 1 declined", "a: 1 site applied"]
    assert by_kind(Report()) == []


def test_reasons_come_most_frequent_first() -> None:
    declined = [site(reason="one"), *(site(reason="two", line=i) for i in range(3))]
    (kind,) = by_kind(report({"declined": declined}))
    assert [(reason.reason, reason.count, len(reason.rows)) for reason in kind.declined] == [
        ("two", 3, 3),
        ("one", 1, 1),
    ]
    assert kind.title == "k: 0 sites applied, 4 declined" and kind.cost == {}


def test_figures_are_sums_and_durations_those_of_the_slowest_process() -> None:
    def of(bytes_: float, before: float, after: float) -> Site:
        cost = {"bytes_not_saved": bytes_, "unfused_us": before, "fused_us": after, "gain": before / after}
        return site(cost=cost)

    (kind,) = by_kind(report({"applied": [of(10, 8, 2), of(20, 16, 4)]}, {"applied": [of(40, 12, 3)]}))
    assert kind.cost == {"bytes_not_saved": 70, "unfused_us": 24, "fused_us": 6, "gain": 4}
    assert kind.applied[0].figures == (
        "together 70 B no longer saved for the backward, 24 us -> 6 us predicted (4 times as fast)"
    )
    (kind,) = by_kind(report({"applied": [of(1, 8, 2), of(1, 8, 4)]}))
    assert "gain" not in kind.cost  # four and two make neither; the sums of the times say it
    assert figures(kind.cost).endswith("16 us -> 6 us predicted (2.67 times as fast)")


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({}, ""),
        ({"nodes_removed": 3.0, "bytes_saved": 2.0**20}, "nodes removed: 3, bytes saved: 1 MiB"),
        ({"launch_us": 3.0, "wait_s": 0.5}, "launch: 3 us, wait: 500 ms"),
        ({"gain": 1.25}, "1.25 times as fast"),
        ({"measured_gain": 1.25}, "1.25 times as fast, measured"),
        ({"fused_us": 3.0}, "fused: 3 us"),
        ({"unfused_us": 0.0, "fused_us": 3.0}, "0 s -> 3 us predicted"),
        (
            {"unfused_us": 4.0, "fused_us": 2.0, "gain": 9.0, "measured_unfused_us": 6.0, "measured_fused_us": 4.0},
            "4 us -> 2 us predicted (2 times as fast), 6 us -> 4 us measured (1.5 times as fast)",
        ),
    ],
)
def test_figures_in_words(cost: dict[str, float], words: str) -> None:
    assert figures(cost) == words


def test_one_site_is_not_together() -> None:
    (kind,) = by_kind(report({"applied": [site(cost={"bytes_not_saved": 1024.0})]}))
    assert kind.applied[0].figures == "1 KiB no longer saved for the backward"
    (kind,) = by_kind(report({"applied": [site(), site()]}))
    assert kind.applied[0].figures == ""


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ""),
        (["", ""], ""),
        (["a", "a"], "a"),
        (["h.0", "h.1"], "h.0, h.1"),
        (["h.0.x", "h.1.x", "h.2.x", "h.0.x"], "h.0.x ... h.2.x"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
    ],
)
def test_names_in_words(names: list[str], words: str) -> None:
    assert in_words(names, general) == words


def test_a_report_reads_back_with_the_same_rows(attention_report: Report, new_report: Callable[..., Report]) -> None:
    again = Report.model_validate_json(attention_report.model_dump_json())
    assert by_kind(again) == by_kind(attention_report) != by_kind(new_report())
