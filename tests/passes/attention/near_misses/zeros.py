"""Weights that are set to zero behind the softmax: where they are NaN, where a mask says so, in whole rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attention_near_misses.program import Inputs, Suite

suite = Suite("zeros")
FILLS = {"-inf": -math.inf, "-1e9": -1e9, "-1e4": -1e4}


def masked(r: Inputs) -> list[Any]:
    """q, k, v, what each query sees, the last one nothing, and rows to be kept."""
    return [*r.qkv(), r.bools(2, 1, 6, 6, full="one"), r.bools(2, 1, 6, 1)]


def _weights(q, k, mask, fill):
    return (q @ k.mT * 0.35).masked_fill(~mask, fill).softmax(-1)


def _after(name: str, why: str, zeroed: Callable[..., torch.Tensor], expect: str = "equal") -> None:
    """A program for each fill; `zeroed` gets the weights, the mask and the rows."""
    for word, fill in FILLS.items():

        def program(q, k, v, mask, rows, fill=fill):
            return zeroed(_weights(q, k, mask, fill), mask, rows) @ v

        getattr(suite, expect)(masked, name=f"{name}, {word}", why=why)(program)


_after("isnan", "NaN set to zero", lambda p, m, r: torch.where(torch.isnan(p), 0.0, p))
_after("isnan, filled", "The same, in place of `where`", lambda p, m, r: p.masked_fill(p.isnan(), 0.0))
_after("not isnan", "The same, the other way round", lambda p, m, r: torch.where(~torch.isnan(p), p, 0.0))
_after("equal to itself", "What is NaN is not equal to itself", lambda p, m, r: torch.where(p == p, p, 0.0))
_after("isnan becomes one", "Rows of ones", lambda p, m, r: torch.where(torch.isnan(p), 1.0, p), "decline")
_after("numbers set to zero", "NaN is kept, numbers are not", lambda p, m, r: p.where(p.isnan(), 0.0), "decline")
_after("mask", "The mask of the scores, negated", lambda p, m, r: torch.where(m, p, 0.0))
_after("mask inverted", "Masked keys are kept, seen ones set to zero", lambda p, m, r: p.masked_fill(m, 0.0), "decline")
_after("mask as a factor", "Times the mask: NaN stays in rows without a key", lambda p, m, r: p * m)
_after("mask as numbers", "Times the mask in the dtype of the weights", lambda p, m, r: p * m.to(p.dtype))
_after("twice by the mask", "Times the mask, and set to zero", lambda p, m, r: (p * m).masked_fill(~m, 0.0))
_after("another mask as a factor", "Of other keys", lambda p, m, r: p * m.roll(1, -1), "decline")
_after("negated mask as a factor", "What is hidden is kept", lambda p, m, r: p * ~m, "decline")
_after("mask as a divisor", "Infinity where a key is hidden", lambda p, m, r: p / (m + 0.5), "decline")
_after("rows", "Rows of a mask of their own", lambda p, m, r: torch.where(r, p, 0.0))
_after("rows filled", "The same, filled", lambda p, m, r: p.masked_fill(~r, 0.0))
_after("rows without a key", "Rows that see nothing", lambda p, m, r: p.masked_fill(~m.any(-1, keepdim=True), 0.0))
_after("rows with a key", "Rows that see anything", lambda p, m, r: p.masked_fill(m.any(-1, keepdim=True), 0.0))
_after("rows of ones", "Rows set to one are no zeros", lambda p, m, r: torch.where(r, p, 1.0), "decline")


@suite.equal(masked)
def product_behind_two_fills(q, k, v, mask, rows):
    """The second fill makes a number of minus infinity: rows without a key are uniform, and zeros by the product."""
    scores = (q @ k.mT * 0.35).masked_fill(~mask, -math.inf).masked_fill(~mask, -1e9)
    return (scores.softmax(-1) * mask) @ v


@suite.equal(masked)
def product_behind_another_fill(q, k, v, mask, rows):
    """What is hidden by minus infinity is hidden again, as a number."""
    hidden = ~mask & ~mask.roll(1, -2)
    scores = (q @ k.mT * 0.35).masked_fill(~mask, -math.inf).masked_fill(hidden | ~mask.any(-1, True), -1e9)
    return (scores.softmax(-1) * mask) @ v


@suite.equal(masked)
def product_behind_a_floor(q, k, v, mask, rows):
    """Minus infinity becomes the lowest number, so that rows without a key are uniform."""
    scores = (q @ k.mT * 0.35).masked_fill(~mask, -math.inf)
    scores = torch.clamp(scores, min=torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) * mask) @ v


@suite.equal(masked)
def product_beside_a_bias(q, k, v, mask, rows):
    """What is added hides all that the mask has left in some rows: they are NaN, or zeros, by what comes last."""
    hidden = torch.zeros(6, 6).masked_fill(torch.eye(6, dtype=torch.bool), -math.inf)
    scores = (q @ k.mT * 0.35 + hidden).masked_fill(~mask, -1e9)
    return (scores.softmax(-1) * mask) @ v


@suite.equal(masked)
def product_with_a_cast_of_a_cast(q, k, v, mask, rows):
    """Numbers made booleans, and numbers again."""
    seen = (mask.to(q.dtype) * 2).bool()
    return (_weights_of(q, k, seen) * seen.to(q.dtype)) @ v


def _weights_of(q, k, seen):
    return (q @ k.mT * 0.35).masked_fill(~seen, -1e9).softmax(-1)


@suite.equal(masked)
def numbers_added_to_minus_infinity(q, k, v, mask, rows):
    """What is added after the fill passes NaN on to what it is made of: here to k."""
    scores = (q @ k.mT * 0.35).masked_fill(~mask, -math.inf) + k.mean(-1).unsqueeze(-2)
    return scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v


@suite.equal(masked)
def gate_before_zero(q, k, v, mask, rows):
    """Weights are gated before they are set to zero: 0 · NaN flows to the gate."""
    weights = _weights(q, k, mask, -math.inf) * q.mean(-1, keepdim=True)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v


@suite.equal(masked)
def some_rows_left(q, k, v, mask, rows):
    """Rows of two masks are set to zero, and those of one are not those without a key: v gets NaN where one is left."""
    weights = _weights(q, k, mask, -math.inf)
    return torch.where(rows, weights, 0.0).masked_fill(mask.all(-1, keepdim=True), 0.0) @ v


@suite.equal(lambda r: [r.randn(2, 4, 6, 8), r.randn(2, 2, 6, 8), r.randn(2, 2, 6, 8), *masked(r)[3:]])
def groups_share_rows(q, k, v, mask, rows):
    """Heads share keys and values, and all have the rows that are set to zero."""
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return _weights(q, k, mask, -math.inf).masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v
