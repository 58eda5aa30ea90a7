"""What to write instead, per kind of break: the texts of this folder's TOML files, and how one is chosen.

A text stands under Dynamo's names of the kinds of break (`types`), which are steadier than the ids of its registry.
`match`, a regular expression on Dynamo's explanation and context, narrows it; its named groups fill the text's
`{placeholders}`. Of the texts of a kind the first that matches is taken, in the order of the file. Nothing here looks
at the user's files.
"""

from __future__ import annotations

import functools
import re
import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from optpass.errors import AuditError

#: Sentences in Dynamo's hints that say nothing about the code at hand.
_BOILERPLATE = re.compile(
    r"(report|file|open|submit) an issue|"
    r"report a bug|"
    r"It may be possible to write Dynamo tracing rules|"
    r"This graph break is fundamental|"
    r"This graph break may be difficult to debug|"
    r"This graph break may have been caused by an earlier graph break|"
    r"This is likely to be a Dynamo bug|"
    r"Your code may result in an error when running in eager|"
    r"You can do this by removing the `torch\.compile` call|"
    r"Please double check that your code|"
    r"Dynamo does not really define|"
    r"This branch is not supposed to be reachable",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!])\s+(?=[A-Z`])")


@dataclass(frozen=True)
class Entry:
    """One text and what it is for.

    Attributes:
        text: the advice, with `{placeholders}`.
        match: narrows the kind of break; None: any of the kind.
        file: where it stands, for messages.
    """

    text: str
    match: re.Pattern[str] | None
    file: str

    def fill(self, about: str) -> str | None:
        """The text for a break that Dynamo says `about`, None if it is not for it."""
        if self.match is None:
            return self.text
        found = self.match.search(about)
        if found is None:
            return None
        names = {name: value.strip() for name, value in found.groupdict().items() if value is not None}
        return self.text.format(**names) if _placeholders(self.text) <= names.keys() else None


def advise(gb_type: str, gb_id: str | None, context: str, explanation: str, hints: Sequence[str]) -> str:
    """What to do about a break, in one to three sentences; '' where nothing concrete is known.

    Args:
        gb_type: Dynamo's name of the kind of break.
        gb_id: its id in Dynamo's registry, as 'GB0059'; a text may stand under it instead, for a kind whose name
            differs between releases of torch.
        context: Dynamo's developer context, '' where it is not known: texts are then less specific.
        explanation: Dynamo's explanation.
        hints: Dynamo's own hints, taken without their boilerplate where no text is known.
    """
    about = f"{explanation}\n{context}"
    texts = knowledge()
    for entry in texts.get(gb_type) or texts.get(gb_id or "", ()):
        text = entry.fill(about)
        if text is not None:
            return text
    return " ".join(filter(None, map(_concrete, hints)))


@functools.cache
def knowledge() -> Mapping[str, Sequence[Entry]]:
    """The texts by kind of break, in the order of preference.

    Raises:
        AuditError: a file of this folder is not as it should be.
    """
    found: dict[str, list[Entry]] = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".toml"):
            continue
        for row in tomllib.loads(file.read_text(encoding="utf-8"))["advice"]:
            entry = _entry(row, file.name)
            for kind in row["types"]:
                found.setdefault(kind, []).append(entry)
    # A text for all of a kind comes behind those for some of it, wherever it stands.
    return {kind: sorted(entries, key=lambda entry: entry.match is None) for kind, entries in found.items()}


def _entry(row: Mapping[str, object], file: str) -> Entry:
    text, match = row.get("text"), row.get("match")
    unknown = row.keys() - {"types", "text", "match"}
    if not isinstance(text, str) or not text.strip() or unknown:
        raise AuditError(f"{file}: advice for {row.get('types')} needs a text, and knows no {sorted(unknown)}")
    pattern = re.compile(match) if isinstance(match, str) else None
    named = set(pattern.groupindex) if pattern else set()
    if pattern is None and "{" in text and _placeholders(text):
        raise AuditError(f"{file}: advice for {row.get('types')} has placeholders and no `match` that fills them")
    if pattern is not None and not _placeholders(text) <= named:
        raise AuditError(f"{file}: advice for {row.get('types')}: no group for {_placeholders(text) - named}")
    return Entry(" ".join(text.split()), pattern, file)


def _placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def _concrete(hint: str) -> str:
    """A hint of Dynamo without its boilerplate, '' if nothing else was in it."""
    kept = [part for part in _SENTENCE.split(hint.strip()) if not _BOILERPLATE.search(part)]
    return " ".join(kept).strip()
