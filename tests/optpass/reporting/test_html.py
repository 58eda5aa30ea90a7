"""The page: offline, small, escaped, well formed; and its charts."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from optpass.errors import ReportError
from optpass.reporting import summary
from optpass.reporting.html import LIMIT_BYTES, render_html, write_html
from optpass.reporting.model import Analysis, Op, Report
from optpass.reporting.svg import Box, Scale, loss_chart, nice_ticks, share_bar, thin
from optpass.reporting.svg_roofline import roofline_chart, undrawn

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "hr", "img", "input"}
EVIL = "</svg></style><script>alert(1)</script>\"' & \x1b\x00"


class Checker(HTMLParser):
    """Every element closed in order; collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(checker.tags)
    names = {name for name, _ in checker.attributes}
    assert not {"src", "href", "srcset", "data", "action"} & names and not any(n.startswith("on") for n in names)
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//\w|url\(|@import", re.sub(r"/\*.*?\*/", "", without_namespace))
    assert len(page.encode()) <= LIMIT_BYTES
    return checker


def svgs(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def training(steps: int = 50) -> dict[str, object]:
    losses = [5 * math.exp(-i / 20) + 1 for i in range(steps)]
    return {"steps": [{"step": i, "loss": loss} for i, loss in enumerate(losses)], "eager_loss": losses}


def test_pages_are_offline_well_formed_and_complete(report: Report, analysis: Analysis) -> None:
    report.training = training()
    for obj, count in ((report, 3), (analysis, 2)):
        page = render_html(obj)
        check(page)
        assert len(svgs(page)) == count
        assert "mylib.fancy.default" in page and "pad to 50264 or 50304" in page
    page = render_html(report)
    for words in ("contiguous(x) -&gt; x", "the cast changes the values", "no C++ compiler", "16.8 s", "<details>"):
        assert words in page


def test_sites_are_told_by_kind_with_what_they_save(attention_report: Report) -> None:
    page = render_html(attention_report)
    check(page)
    section = page[page.index("<h2>attention: 24 sites applied, 26 declined</h2>") :]
    section = section[: section.index("</section>")]
    for words in (
        "softmax(q·kᵀ·0.125 + causal) v -&gt; SDPA flash, is_causal",
        "blocks.0.attn ... blocks.11.attn /srv/project/models/gpt.py:44",
        "together 3 GiB no longer saved for the backward, 36 ms -&gt; 12 ms predicted (3 times as fast)",
        "the fastest that takes this mask",
        "the probabilities are returned",
        "softmax_1 ... softmax_23",
        "encoder.attn /srv/project/models/encoder.py:9",
        "together 160 us -&gt; 240 us predicted (0.667 times as fast)",
    ):
        assert words in section, words
    assert section.count("<details>") == 2 and "Together" not in section  # one row already says it
    assert page.index("<h2>redundant: 4 sites") < page.index("<h2>attention: 24 sites")
    assert "No pass changed a graph" in render_html(Report()) and "No pass changed a graph" not in page


def test_many_sites_fit_and_what_is_left_out_is_said(attention_report: Report) -> None:
    record = attention_report.graphs[0].passes[-1]
    first = record.applied[0]
    record.applied = [first.model_copy(update={"line": i, "reason": "because " * 90}) for i in range(4000)]
    record.declined = [
        record.declined[0].model_copy(update={"kind": f"kind {i % 300}", "reason": f"{i} {'since ' * 90}"})
        for i in range(4000)
    ]
    page = render_html(attention_report)
    check(page)
    assert re.search(r"3,\d{3} more kinds of change not shown", page) and "more reasons not shown" in page
    assert "more kinds of site not shown" in page


def test_empty_and_partial_objects_render(analysis: Analysis) -> None:
    check(render_html(Report()))
    analysis.device.attainable_flops = {}
    assert "No chart" in render_html(analysis)
    analysis.ops, analysis.groups = [], []
    check(render_html(analysis))


def test_hostile_names_are_text(report: Report, analysis: Analysis) -> None:
    report.training = training()
    report.name = report.warnings[0] = report.options["inner"] = report.graphs[0].function = EVIL
    for site in report.declined() + report.sites():
        site.reason = site.before = site.module = site.file = EVIL
    analysis.target = analysis.notes[0] = analysis.device.name = EVIL
    analysis.device.attainable_flops[EVIL] = 1e12
    analysis.unknown_ops = {EVIL: 1}
    for op in analysis.ops:
        op.module = op.target = op.file = EVIL
    analysis.ops[0].dtype = EVIL
    for obj in (report, analysis):
        page = render_html(obj)
        check(page)
        assert "&lt;script&gt;alert(1)" in page and svgs(page)


def many(count: int) -> list[Op]:
    return [
        Op(
            name=f"op_{i}", target=f"mylib.operator_with_a_long_name_{i}.default", module=f"{'encoder.' * 30}m{i}",
            file=f"/srv/{'folder/' * 20}model_{i}.py", line=i, flops=1e6 + i, bytes_read=1e4, bytes_written=1e4,
            intensity=(1e6 + i) / 2e4, dtype="bfloat16", bound="memory", aligned=False, mnk=(i + 1, 7, 9),
            time_us=1.0 + i,
        )
        for i in range(count)
    ]  # fmt: skip


def test_20000_ops_fit_and_what_is_left_out_is_said(analysis: Analysis, report: Report) -> None:
    analysis.ops = many(20_000)
    analysis.notes = [f"note {i} " + "x" * 5000 for i in range(500)]
    page = render_html(analysis)
    check(page)
    shown = page.count("<code>mylib.operator")
    assert shown >= 20
    assert re.search(r"19,\d{3} more rows not shown", page) and "more characters" in page
    assert re.search(r"the 19,\d{3} ops that take least", page)
    site = report.declined()[0]
    report.graphs[0].passes[0].declined = [
        site.model_copy(update={"reason": f"{i} {'because ' * 200}"}) for i in range(3000)
    ]
    check(render_html(report))


def test_write_html_is_atomic(tmp_path: Path, analysis: Analysis) -> None:
    write_html(analysis, tmp_path / "deep" / "a.html")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.html"]
    with pytest.raises(ReportError, match="give a file name"):
        write_html(analysis, tmp_path)


def test_marks_lie_at_their_figures_under_the_roof(analysis: Analysis) -> None:
    rows = summary.rank_ops(analysis.ops)
    root = ET.fromstring(roofline_chart(analysis.device, rows))
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert {"memory roof 4.30 TB/s", "794 TFLOP/s", "60 TFLOP/s", "ridge 185 FLOP/B", "compute-bound"} <= set(texts)
    assert any("FLOP per byte" in t for t in texts) and any("FLOP/s)" in t for t in texts)
    points = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    assert len(points) == sum(1 for row in rows if row.op.flops > 0)
    # The decades on the axes give the scale; a circle's centre must read back as its op's figures.
    x_ticks = {float(t.text.replace(",", "")): float(t.get("x", "")) for t in root.iter(f"{SVG}text")
               if t.get("class") == "tick" and t.get("text-anchor") == "middle" and t.text}  # fmt: skip
    (low, x_low), *_, (high, x_high) = sorted(x_ticks.items())
    largest = next(row for row in rows if row.op.bound == "compute")
    circle = points[rows.index(largest)].find(f"{SVG}circle")
    assert circle is not None
    read = math.log10(low) + (float(circle.get("cx", "")) - x_low) / (x_high - x_low) * math.log10(high / low)
    assert 10**read == pytest.approx(largest.op.intensity, rel=0.01)
    assert float(circle.get("r", "")) == pytest.approx(34 * math.sqrt(largest.share), abs=0.06)


def test_what_the_chart_leaves_out_is_said(analysis: Analysis) -> None:
    rows = summary.rank_ops(analysis.ops)
    assert undrawn(rows).startswith("Not drawn: 1 op without FLOPs (")
    assert "ops that take least" in undrawn(rows, most=3)
    assert roofline_chart(analysis.device, [row for row in rows if row.op.flops == 0]) == ""


def _label_boxes(root: ET.Element) -> list[tuple[str, Box]]:
    boxes = []
    for element in root.iter(f"{SVG}text"):
        if element.get("transform"):
            continue
        width = len(element.text or "") * 5.5
        x, y = float(element.get("x", "")), float(element.get("y", ""))
        x -= {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        boxes.append((element.text or "", Box(x, y - 10, x + width, y + 2)))
    return boxes


def test_labels_do_not_overlap_even_with_many_close_roofs(analysis: Analysis) -> None:
    rates = {"bfloat16": 800e12, "float16": 790e12, "int8": 780e12, "float8_e4m3fn": 770e12}
    rates |= {"float32": 60e12, "float64": 59e12}
    analysis.device.attainable_flops = rates
    for i, op in enumerate(analysis.ops):
        op.dtype = list(rates)[i % len(rates)]
    root = ET.fromstring(roofline_chart(analysis.device, summary.rank_ops(analysis.ops)))
    boxes = _label_boxes(root)
    assert sum("ridge" in words for words, _ in boxes) == 6
    for i, (one, a) in enumerate(boxes):
        for other, b in boxes[i + 1 :]:
            assert not a.overlaps(b), (one, other)
        assert a.within(Box(0, 0, 960, 520)), one


def test_loss_chart_draws_both_curves_and_thins_long_ones() -> None:
    assert loss_chart([], []) == ""
    loss = [(float(i), 5.0 - i / 1000) for i in range(3000)]
    root = ET.fromstring(loss_chart(loss, loss[:10]))
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert {"training step", "loss", "eager", "compiled with optpass (every 8th step drawn)"} <= set(texts)
    lines = [p.get("points", "").split() for p in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [10, 376]
    for points in lines:
        xs, ys = zip(*(map(float, point.split(",")) for point in points), strict=True)
        assert list(xs) == sorted(xs) and list(ys) == sorted(ys)  # loss falls: y grows downwards
    assert thin(loss)[0][-1] == loss[-1]
    for flat in ([(0.0, 2.0)], [(0.0, 0.0), (1.0, 0.0)], [(5.0, 1e-9), (6.0, -1e9)]):
        ET.fromstring(loss_chart(flat, []))


def test_the_bar_is_as_long_as_the_shares(analysis: Analysis) -> None:
    shares = summary.bound_shares(analysis)
    root = ET.fromstring(share_bar(shares, "shares"))
    widths = [float(rect.get("width", "")) / 760 for rect in root.iter(f"{SVG}rect")]
    assert widths == pytest.approx([share.share for share in shares], abs=1e-3)


def test_scales_and_ticks() -> None:
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(0, 4, 10, 0)(1) == pytest.approx(7.5)
    assert nice_ticks(2.04, 5.6) == [2.0, 3.0, 4.0, 5.0, 6.0]
    ticks = nice_ticks(0.0011, 0.0012)
    assert ticks[0] <= 0.0011 and ticks[-1] >= 0.0012 and len(ticks) <= 7


def test_templates_are_readable_without_a_device(new_report: Callable[..., Report]) -> None:
    report = new_report()
    report.device = None
    check(render_html(report))
