"""Terminal, Markdown and the page."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from optpass.errors import AuditError
from optpass.reporting.audit.baseline import compare
from optpass.reporting.audit.html import render_html, write_html
from optpass.reporting.audit.markdown import LIMIT, fenced, render_markdown, span
from optpass.reporting.audit.model import Audit
from optpass.reporting.audit.terminal import render
from optpass.reporting.html import LIMIT_BYTES

VOID = {"meta", "br"}


def shown(audit: Audit, **options: object) -> str:
    console = Console(file=io.StringIO(), highlight=False, markup=False, emoji=False, width=100)
    render(audit, console, **options)  # type: ignore[arg-type]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_terminal_tells_what_matters(audit: Audit) -> None:
    text = shown(audit)
    for words in (
        "optpass audit: train.py --lr 1\n2030-01-02T03:04:05+00:00, torch 2.13.0, python 3.11.7\n",
        "1 graph break, 2 recompiles, 1 function runs eager; 4 graphs with 83.0% of the tensor operations; first calls",
        " 2.5 s, steady calls 2 ms\n",
        "1. train.py:5:8 in step (blocks.0)  x3\n   GB0170 Data-dependent branching: The branch depends on",
        "     5 | if y.sum() > 0:\n       |    ^^^^^^^^^^^\n",
        "   effect: the rest of the function runs eager\n",
        "cost: 1 MiB across the boundary per call, 120 us of fusion lost per call (predicted), 1.5 s compiling what",
        " is behind it, 12 us of guards per call (cold caches)\n",
        "follows from it: train.py:6:9 in step: GB0059 Failed to trace builtin operator\n",
        "- train.py:3 in step  x2\n   float: scale 0.5 -> 0.25\n   seen: 0.5, 0.25, 0.125\n",
        "   guards: L['scale'] == 0.5\n   cost: 800 ms compiling\n   fix: Make it a tensor.\n",
        "- train.py:9 in wide\n   skip poisoned, 7 calls ran eager since: First call had no op.\n",
        "Notes\n- a note\n",
    ):
        assert words in text, words
    assert "partial" not in text and "\n2. " not in text


def test_the_terminal_tells_the_difference_and_what_is_left_out(audit: Audit, large: Audit) -> None:
    audit.partial = "the program was interrupted (SIGINT)"
    text = shown(audit, difference=compare(Audit(root=audit.root), audit))
    assert "partial: the program was interrupted (SIGINT)" in text
    assert "Against the baseline: 3 new, 0 gone, 0 the same" in text and "x3 [new]" in text
    assert "new: train.py:3 in step: recompiled, float: scale 0.5 -> 0.25" in text
    text = shown(large, top=2)
    assert "... and 2998 more breaks" in text and "... and 2998 more recompiles" in text and "\x1b" not in text


class Checker(HTMLParser):
    """Elements closed in order; collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == [] and not {"script", "img", "link", "iframe"} & checker.tags
    assert not {"src", "href"} & checker.attributes
    assert not any(name.startswith("on") for name in checker.attributes)
    assert not re.search(r"https?:|url\(|@import", re.sub(r"/\*.*?\*/", "", page))
    assert len(page.encode()) <= LIMIT_BYTES


def test_the_page_is_offline_whole_and_escaped(audit: Audit, large: Audit) -> None:
    audit.breaks[0].fix.diff = audit.breaks[1].fix.diff
    page = render_html(audit, difference=compare(Audit(root=audit.root), audit))
    check(page)
    for words in (
        "<h1>train.py --lr 1</h1>", "prefers-color-scheme: dark", "if <mark>y.sum() &gt; 0</mark>:",
        '<span class="del">-        print(&#34;positive&#34;)</span>', "3 new, 0 gone", "83.0%",
        "skip poisoned, 7 calls ran eager since", "float: scale 0.5 -&gt; 0.25", "Compiled functions", "a hook",
        "<code>optpass.audit/1</code>",
    ):  # fmt: skip
        assert words in page, words
    check(render_html(Audit()))
    page = render_html(large)
    check(page)
    assert "more breaks not shown" in page and "<script" not in page


def test_the_page_is_written_or_an_error(audit: Audit, tmp_path: Path) -> None:
    write_html(audit, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == render_html(audit)
    with pytest.raises(AuditError, match="give a file name"):
        write_html(audit, tmp_path)


def test_markdown_folds_each_finding(audit: Audit, large: Audit) -> None:
    audit.breaks[0].fix.diff = audit.breaks[1].fix.diff
    text = render_markdown(audit)
    assert text.startswith("### optpass audit: `train.py --lr 1`\n")
    assert text.count("<details>") == text.count("</details>") == 3
    assert "```diff\n--- a/train.py" in text and "```text\n4 | y = x * scale\n" in text
    assert "scale 0.5 -&gt; 0.25" in text
    text = render_markdown(audit, difference=compare(Audit(root=audit.root), audit))
    assert "| graph breaks | 0 | **1** |" in text and "**Against the baseline: 3 new, 0 gone, 0 the same.**" in text
    text = render_markdown(audit, difference=compare(audit, audit))
    assert "<details>" not in text and "0 new" in text
    text = render_markdown(large)
    assert len(text) <= LIMIT and "... and 8990 more" in text
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside.replace("\\<", "") and "\\<script\\>" in outside


def test_markdown_cannot_be_left_by_the_programs_text() -> None:
    assert span("a`b``c") == "``` a`b``c ```"
    assert next(iter(fenced("x\n````\ny", "text"))) == "`````text"
