"""The audit as Markdown for a comment on a pull request: counts, what is new, and each finding folded, with its diff.

GitHub's flavour. Text from the program stands in code spans or fences that it cannot close; names are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from optpass.reporting.audit import words
from optpass.reporting.audit.baseline import Difference, Finding, findings
from optpass.reporting.audit.model import Audit, Break, Recompile, SilentEager
from optpass.reporting.audit.source import frame

#: GitHub takes comments of 65,536 characters; the rest of a longer one is cut off with a note.
LIMIT = 60_000
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~@])")


def render_markdown(audit: Audit, *, difference: Difference | None = None, top: int = 10) -> str:
    """The comment, at most `LIMIT` characters.

    Args:
        difference: from a baseline; what is new then comes first, and what is the same is only counted.
        top: findings that are shown with their details.
    """
    parts = list(_lines(audit, difference, top))
    text = "\n".join(parts).rstrip() + "\n"
    while len(text) > LIMIT and top > 1:
        top //= 2
        text = "\n".join(_lines(audit, difference, top)).rstrip() + "\n"
    return text if len(text) <= LIMIT else text[:LIMIT] + "\n\n(cut off)\n"


def _lines(audit: Audit, difference: Difference | None, top: int) -> Iterator[str]:
    yield "### optpass audit" + (f": {span(audit.target)}" if audit.target else "")
    yield ""
    if audit.partial:
        yield f"**Partial**: {escape(audit.partial)}"
        yield ""
    yield escape(words.headline(audit)) + "."
    yield ""
    if difference is None:
        yield from _details(findings(audit), top)
        return
    yield from _table(difference)
    yield f"**{difference.headline()[0].upper() + difference.headline()[1:]}.**"
    yield ""
    yield from _details(difference.new, top)
    if difference.gone:
        yield f"<details><summary>{len(difference.gone)} gone</summary>"
        yield ""
        yield from (f"- {escape(finding.line())}" for finding in difference.gone[:top])
        yield from _more(len(difference.gone), top)
        yield "</details>"


def _table(difference: Difference) -> Iterator[str]:
    yield "| | baseline | now |"
    yield "| --- | ---: | ---: |"
    for name, before, after in difference.counts:
        mark = f"**{escape(after)}**" if before != after else escape(after)
        yield f"| {name} | {escape(before)} | {mark} |"
    yield ""


def _details(group: Sequence[Finding], top: int) -> Iterator[str]:
    for finding in group[:top]:
        yield f"<details><summary>{html(finding.line())}</summary>"
        yield ""
        yield from _body(finding)
        yield "</details>"
        yield ""
    yield from _more(len(group), top)


def _more(total: int, top: int) -> Iterator[str]:
    if total > top:
        yield ""
        yield f"... and {total - top} more."
        yield ""


def _body(finding: Finding) -> Iterator[str]:
    record = finding.record
    if record is None:
        return
    if isinstance(record, Break):
        yield from _paragraph(record.reason)
    if (shown := frame(record)) is not None:
        yield from fenced(shown.text(), "python" if shown.start is None else "text")
    if isinstance(record, Break):
        yield from _paragraph(words.effect(record), "Effect: ")
        yield from _paragraph(words.cost(record.cost), "Cost: ")
    yield from _facts(record)
    yield from _paragraph(record.fix.text, "Fix: ")
    if record.fix.diff:
        yield from fenced(record.fix.diff.rstrip("\n"), "diff")
        yield from _paragraph(record.fix.note, "Note: ")
    yield from _paragraph(words.verdict(record.fix.verified, record.fix.outcome), "Verified: ")


def _facts(record: Break | Recompile | SilentEager) -> Iterator[str]:
    if isinstance(record, Recompile):
        for name, value in words.recompile_facts(record):
            yield from _paragraph(value, f"{name.capitalize()}: ")
    elif isinstance(record, SilentEager):
        yield from _paragraph(record.reason)


def _paragraph(text: str, label: str = "") -> Iterator[str]:
    if text:
        yield label + prose(" ".join(text.split()))
        yield ""


def fenced(text: str, language: str) -> Iterator[str]:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}{language}"
    yield text
    yield fence
    yield ""


def span(text: str) -> str:
    """A code span that the text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{ticks}{pad}{' '.join(text.split())}{pad}{ticks}"


def prose(text: str) -> str:
    """Text whose `code` in backticks stays code; everything else is shown as it is."""
    parts = text.split("`")
    if len(parts) % 2 == 0 or "``" in text:
        return escape(text)
    return "".join(span(part) if index % 2 else _escaped(part) for index, part in enumerate(parts))


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def html(text: str) -> str:
    """Text inside an HTML element of a comment; mentions and Markdown are harmless there too."""
    safe = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<code>{safe}</code>"
