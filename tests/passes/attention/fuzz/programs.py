"""A whole random program, drawn choice by choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attention_fuzz import operands, scores, twists
from attention_fuzz.source import Source


def generate(choose: Callable[[Sequence[Any]], Any]) -> Source:
    """A program; every decision is one call of `choose`, whose first option is the plainest."""
    s = Source(choose)
    operands.sizes(s)
    planned = twists.plan(s)
    if any("extra" in text for texts in planned.values() for text in texts):
        s.line("extra = []")
    operands.operands(s)
    operands.heads(s)
    twists.write(s, planned["operands"])
    _, after = operands.scale(s)
    operands.product(s, after)
    twists.write(s, planned["scores"])
    scores.between(s)
    twists.write(s, planned["logits"])
    scores.softmax(s)
    scores.zeroed(s)
    twists.write(s, planned["weights"])
    twists.write(s, planned["between"])
    scores.output(s)
    twists.write(s, planned["end"])
    s.line("return [out, *extra]" if any("extra" in line for line in s.lines) else "return [out]")
    return s
