"""The terminal view: on a terminal, in a pipe, and with hostile names."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from optpass.reporting.audit.model import Audit
from optpass.reporting.model import Analysis, Report
from optpass.reporting.terminal import render_analysis, render_report


def shown(obj: Analysis | Report, *, width: int | None = None, top: int = 10) -> str:
    """What is printed to a pipe, or with `width` to a terminal that wide."""
    console = Console(file=io.StringIO(), width=width or 80, force_terminal=width is not None, highlight=False)
    if isinstance(obj, Analysis):
        render_analysis(obj, console, top=top)
    else:
        render_report(obj, console, top=top)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_document_reads_as_what_a_pipe_gets(analysis: Analysis, report: Report) -> None:
    for obj in (analysis, report):
        assert f"{obj}\n" == shown(obj)
        assert "\n" not in repr(obj) and len(repr(obj)) < 200
    assert repr(Report()) == "<Report: empty; print it to read it>"
    assert f"{len(report.graphs)} graphs" in repr(report)
    assert "0 graphs" in str(Audit())


def test_a_pipe_gets_plain_text_with_whole_paths(analysis: Analysis, report: Report) -> None:
    deep = "/srv/" + "a_long_folder_name/" * 12 + "model.py"
    for op in analysis.ops:
        op.file = deep
    for obj in (analysis, report):
        out = shown(obj)
        assert "\x1b" not in out and out.isascii()
        assert all(line == line.rstrip() for line in out.splitlines())
    assert f"{deep}:80" in shown(analysis)
    assert "/srv/project/models/gpt.py:47" in shown(report)


def test_80_columns_hold_every_line(analysis: Analysis, report: Report) -> None:
    for obj in (analysis, report):
        lines = re.sub(r"\x1b\[[\d;]*m", "", shown(obj, width=80)).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)


def test_an_analysis_says_what_matters(analysis: Analysis) -> None:
    out = shown(analysis)
    for words in (
        "optpass analysis: gpt --size small",
        "training step",
        "NVIDIA H200 (h200), from its datasheet",
        "unfused ->",
        "MFU            ",
        "time bound by  compute",
        "blocks.*.mlp.up",
        "N=50257 is no multiple of 8: pad to 50264 or 50304",
        "no N=50257",
        "mylib.fancy.default",
        "NOT in the totals",
        "dropout counted as pointwise",
    ):
        assert words in out


def test_a_report_says_what_matters(report: Report) -> None:
    report.training = {"steps": [{"step": 0, "loss": 4.0}, {"step": 1, "loss": 3.5}], "eager_loss": [4.0, 3.5]}
    report.graphs[0].passes[1].error = "ValueError: no"
    out = shown(report)
    for words in (
        "Compile cost",
        "16.8 s, of which optpass's passes 420 ms",
        "first calls   18.2 s",
        "steady calls  24.6 ms",
        "models/gpt.py:62 forward",
        "redundant: 4 sites applied, 2 declined",
        "contiguous(x) -> x (4 sites)",
        "the tensor is contiguous already",
        "declined: the cast changes the values: float32 -> bfloat16 -> float32 (2 sites)",
        "roofline failed and was undone: graph 0: ValueError: no",
        "4.0000 at step 0 -> 3.5000 at step 1",
        "sum over graphs, each run once",
        "no C++ compiler: aot_eager serves instead",
    ):
        assert words in out


def test_sites_are_told_by_kind(attention_report: Report) -> None:
    lines = shown(attention_report).splitlines()
    start = lines.index("attention: 24 sites applied, 26 declined")
    assert lines[start + 1 : start + 12] == [
        "softmax(q·kᵀ·0.125 + causal) v -> SDPA flash, is_causal (24 sites)",
        "    blocks.0.attn ... blocks.11.attn /srv/project/models/gpt.py:44",
        "    together 3 GiB no longer saved for the backward, 36 ms -> 12 ms predicted (3 times as fast)",
        "    the fastest that takes this mask",
        "declined: the probabilities are returned (24 sites)",
        "    blocks.0.attn ... blocks.11.attn /srv/project/models/gpt.py:44 at node softmax_1 ... softmax_23",
        "    softmax(q·kᵀ·0.125) v",
        "declined: does not pay (2 sites)",
        "    encoder.attn /srv/project/models/encoder.py:9 at node bmm_1",
        "    softmax(q·kᵀ) v",
        "    together 160 us -> 240 us predicted (0.667 times as fast)",
    ]
    narrow = re.sub(r"\x1b\[[\d;]*m", "", shown(attention_report, width=80)).splitlines()
    assert max(map(len, narrow)) <= 80


def test_sites_are_cut_and_it_is_said(attention_report: Report) -> None:
    record = attention_report.graphs[0].passes[-1]
    record.applied = [site.model_copy(update={"line": i}) for i, site in enumerate(record.applied)]
    record.declined = [record.declined[0].model_copy(update={"line": i}) for i in range(5)]
    out = shown(attention_report, top=3)
    assert "... and 10 more kinds of change" in out  # twelve lines of one graph, and the other's all in one row
    assert "... and 3 more places" in out
    assert "attention: 24 sites applied, 18 declined  3 GiB no longer saved for the backward, 36 ms -> 12 ms" in out


def test_top_cuts_and_says_so(new_analysis: Callable[..., Analysis]) -> None:
    out = shown(new_analysis(), top=2)
    assert "... and 14 more rows" in out and "... and 8 more modules" in out
    assert "more rows" not in shown(new_analysis(), top=1000)


def test_empty_objects_render() -> None:
    assert "no graph was compiled" in shown(Report()) and "not measured" in shown(Report(), width=80)


@pytest.mark.parametrize("width", [None, 80, 200])
def test_names_are_neither_markup_nor_control_codes(analysis: Analysis, width: int | None) -> None:
    analysis.target = "[bold]x[/bold] \x1b]0;owned\x07"
    analysis.notes = ["[/nothing] to close"]
    analysis.ops[0].module = "[red]m[/red]"
    out = shown(analysis, width=width, top=1000)
    assert "[bold]x[/bold]" in out and "[/nothing] to close" in out and "[red]m[/red]" in out
    assert "\x1b]0;" not in out and "\x07" not in out
