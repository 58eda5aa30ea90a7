"""Dynamo's message of a break, taken apart: its kinds in order of cause, explanation and hints."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHAIN = re.compile(r"\s*\*\*\* While handling this graph break, another graph break occurred: \*\*\*\s*")
_PART = re.compile(r"^  (?P<name>Explanation|Hint|Higher Order Operator|Developer debug context): ?", re.MULTILINE)
_LINK = re.compile(r"^ ?For more details about this graph break, please visit: \S+\s*$", re.MULTILINE)
_STACK = re.compile(r"\n+from user code:\n.*", re.DOTALL)
#: Appended by Dynamo to some explanations: the computation behind a value, line by line.
_TRACE = re.compile(r"\n\s*The branch condition involves a tensor computed as follows:.*", re.DOTALL)
#: Put before the message of a break inside an operator that takes functions, such as `torch.cond`.
_WRAPPED = re.compile(r"\A\s*This higher order operator [^\n]*Got graph break/error:\s*")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Said:
    """One kind of break in a message."""

    kind: str
    reason: str
    hints: tuple[str, ...]
    context: str


def parse(message: str, kind: str = "") -> list[Said]:
    """What a message says, the cause first and what followed from it behind; at least one.

    Args:
        message: `Unsupported.msg`, or the text of the trace log.
        kind: Dynamo's name of the last kind in it, where it is known.
    """
    parts = [part for part in _CHAIN.split(_WRAPPED.sub("", _STACK.sub("", message))) if part.strip()] or [
        message or kind
    ]
    said = [_one(part) for part in parts]
    if kind and said[-1].kind != kind:
        last = said[-1]
        said[-1] = Said(kind, last.reason, last.hints, last.context)
    return said


def _one(text: str) -> Said:
    text = _LINK.sub("", text).strip("\n")
    pieces = _PART.split(text)
    lines = [line.strip() for line in pieces[0].splitlines() if line.strip()]
    named = list(zip(pieces[1::2], pieces[2::2], strict=False))
    explanation = next((_TRACE.sub("", body) for name, body in named if name == "Explanation"), "")
    kind = lines[0] if lines else "unknown"
    reason = _flat(explanation) or _flat(" ".join(lines)) or kind
    context = next((body.strip() for name, body in named if name == "Developer debug context"), "")
    hints = tuple(_flat(body) for name, body in named if name == "Hint" and body.strip())
    return Said(kind if named else _short(kind), reason, hints, context)


def _flat(text: str) -> str:
    return _SPACE.sub(" ", text).strip()


def _short(kind: str) -> str:
    """The first sentence of a message that has no parts, and so no name of its kind."""
    return kind.split(". ")[0].rstrip(".")[:120]
