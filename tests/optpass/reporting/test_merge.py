"""Reports of several processes and runs as one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optpass.errors import ReportError
from optpass.reporting.merge import merge
from optpass.reporting.model import Report

New = Callable[..., Report]


def test_processes_are_ordered_by_rank_and_ids_are_prefixed(new_report: New) -> None:
    merged = merge([new_report(pid=11, rank=1), new_report(pid=10, rank=0)])
    assert [(p.rank, p.pid) for p in merged.processes] == [(0, 10), (1, 11)]
    assert [(g.id, g.process) for g in merged.graphs] == [("0/0", 0), ("0/1", 0), ("1/0", 1), ("1/1", 1)]
    assert {op.graph for op in merged.ops} == {group.graph for group in merged.groups} == {"0/0", "0/1", "1/0", "1/1"}
    assert len(merged.ops) == 2 * len(new_report().ops)


def test_work_is_summed_and_time_is_the_slowest_process(new_report: New) -> None:
    small, large = new_report(pid=1, graphs=1), new_report(pid=2, graphs=3)
    merged = merge([small, large])
    for name in ("flops", "flops_forward", "flops_backward", "bytes_unfused", "bytes_fused", "kernels"):
        assert getattr(merged.totals, name) == pytest.approx(getattr(small.totals, name) + getattr(large.totals, name))
    assert merged.totals.time_us == pytest.approx(large.totals.time_us)
    assert merged.compile.graphs == 4
    assert merged.compile.t_compile_s == pytest.approx(large.compile.t_compile_s)
    assert merged.unknown_ops == {"mylib.fancy.default": 12}


def test_equal_ranks_keep_their_mfu(new_report: New) -> None:
    ranks = [new_report(pid=pid, rank=pid) for pid in range(3)]
    assert ranks[0].totals.mfu > 0
    assert merge(ranks).totals.mfu == pytest.approx(ranks[0].totals.mfu)


def test_merging_is_associative(new_report: New) -> None:
    a, b, c = (new_report(pid=i, rank=i, graphs=i + 1) for i in range(3))
    left, right = merge([merge([a, b]), c]), merge([a, merge([b, c])])
    assert left == right == merge([a, b, c])


def test_the_later_record_of_a_process_replaces_the_earlier(new_report: New) -> None:
    both = merge([new_report(pid=1, rank=0, graphs=1), new_report(pid=2, rank=1, graphs=1)])
    merged = merge([both, new_report(pid=1, rank=0, graphs=3)])
    assert [g.process for g in merged.graphs] == [0, 0, 0, 1]
    alone = merge([new_report(graphs=1), new_report(graphs=2)])
    assert alone == new_report(graphs=2)


def test_inputs_are_left_alone(new_report: New) -> None:
    report = new_report()
    merge([report, new_report(pid=2)])
    assert report == new_report()


def test_warnings_are_kept_once_and_differences_are_told(new_report: New) -> None:
    a, b = new_report(pid=1), new_report(pid=2)
    b.warnings.append("only b's")
    b.options = {"inner": "eager"}
    b.environment["torch"] = "2.14.0"
    assert b.device is not None
    b.device = b.device.model_copy(update={"name": "NVIDIA L4"})
    merged = merge([a, b])
    assert merged.warnings[:2] == ["no C++ compiler: aot_eager serves instead", "only b's"]
    told = " | ".join(merged.warnings[2:])
    assert "different options" in told and "differ in torch" in told and "NVIDIA L4" in told
    assert merge([merged, merged]).warnings == merged.warnings


def test_different_runs_merge_only_when_asked(new_report: New) -> None:
    a, b = new_report(run_id="a", pid=1), new_report(run_id="b", pid=1)
    with pytest.raises(ReportError, match=r"2 different runs \(a, b\)"):
        merge([a, b])
    merged = merge([a, b], across_runs=True)
    assert len(merged.processes) == 2 and "2 different runs" in merged.warnings[-1]


def test_nothing_is_dropped_in_silence(new_report: New) -> None:
    with pytest.raises(ReportError, match="no report to merge"):
        merge([])
    orphan = new_report()
    orphan.graphs[1].process = 5
    with pytest.raises(ReportError, match="names process 5"):
        merge([orphan, new_report(pid=2)])
