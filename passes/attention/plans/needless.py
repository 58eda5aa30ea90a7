"""Masks that are proved to hide nothing: they are left out of a site, and nothing else of it changes by that.

What stood in front of a fill still stands in front of it, and what was done to the sum that such a mask was added to is
done to the scores all the same. Which masks hide nothing `masks` proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from optpass.passes.attention.find.fills import rounded
from optpass.passes.attention.find.terms import Term
from optpass.passes.attention.masks import MaskFacts
from optpass.passes.attention.site import Fill

_Steps = tuple[str, ...] | None


@dataclass(frozen=True)
class Needed:
    """What is left of the masks of a site.

    Attributes:
        fills, terms: as they were, in their order.
        before: what is done to the scores before the first of `terms`, as steps of `lost.OPERATOR`; None where that is
            more than rounding and scaling.
        idle: the fills that hide nothing.
    """

    fills: list[tuple[Fill, MaskFacts]]
    terms: list[Term]
    before: _Steps
    idle: list[Fill]


def needed(fills: Sequence[tuple[Fill, MaskFacts]], terms: Sequence[Term]) -> Needed:
    """The masks that hide something."""
    left: list[Term] = []
    before: _Steps = ()
    for term in terms:
        if _needed(term.facts):
            left.append(term)
        elif left:
            last = left[-1]
            left[-1] = replace(last, bias=replace(last.bias, after=_joined(last.bias.after, term.bias.after)))
        else:
            before = _joined(before, term.bias.after)
    idle = [f for f, facts in fills if not _needed(facts)]
    return Needed([(_moved(f, terms), facts) for f, facts in fills if _needed(facts)], left, before, idle)


def _needed(facts: MaskFacts) -> bool:
    return facts.kind != "all"


def _joined(first: _Steps, then: _Steps) -> _Steps:
    return None if first is None or then is None else first + then


def _moved(fill: Fill, terms: Sequence[Term]) -> Fill:
    """`fill` among the terms that are left: how many of them follow, and what it is when the first is added."""
    late, written = terms[len(terms) - fill.late :], fill.written
    for term in late:
        if _needed(term.facts):
            break
        for name, *words in map(str.split, term.bias.after or ()):
            if name == "times":
                written *= float(words[0])
            elif name == "round":
                written = rounded(written, getattr(torch, words[0]))
    return replace(fill, late=sum(_needed(term.facts) for term in late), written=written)
