"""Rows that are not numbers in the program as it is written: what becomes infinite, and what NaN gets through."""

from __future__ import annotations

import torch
from attention_near_misses.program import TRAINING, Suite, attend

suite = Suite("not_numbers")


def _later(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@suite.decline(lambda r: [*r.qkv(), r.bools(2, 1, 1, 6).long()])
def infinite_scores_times_a_mask(q, k, v, m):
    """s m - 1e9 (1 - m) behind a fill: minus infinity times 0 is NaN, and no number replaces it."""
    s = (q @ k.mT).masked_fill(_later(q.shape[-2]), -torch.inf)
    return (s * m + -1e9 * (1 - m)).softmax(-1) @ v


@suite.decline(lambda r: [*r.qkv(), r.bools(2, 1, 1, 6).long()])
def infinite_rows_times_a_mask(q, k, v, m):
    """The same where a row of scores was written."""
    s = q @ k.mT
    s[..., 2, :] = -torch.inf
    return (s * m + -1e9 * (1 - m)).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(2, 1, 1, 6).long()])
def lowest_scores_times_a_mask(q, k, v, m):
    """What was filled in before is finite."""
    s = (q @ k.mT).masked_fill(_later(q.shape[-2]), -1e9)
    return (s * m + -1e9 * (1 - m)).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(6, 1, full="one")], modes=(TRAINING,))
def nan_back_through_a_product(q, k, v, rows):
    """A query is hidden whole by minus infinity: NaN gets through a factor 0 on its way back, as through no fill."""
    m = (~_later(q.shape[-2])).to(q.dtype)
    s = (q @ k.mT) * m + -1e4 * (1 - m)
    return (s + torch.where(rows, 0.0, -torch.inf)).softmax(-1) @ v


def _beyond(name: str, why: str, mask, shift: float, kind: str = "decline", dtype=torch.float16) -> None:
    def program(q, k, v, m):
        return attend(q, k, v, lambda s: mask(s, m) + shift)

    inputs = [
        lambda r: [*r.qkv(), r.bools(2, 1, 1, 6, full="one")],
        lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")],
    ]
    for place, make in zip(("padding", "rows"), inputs, strict=True):
        getattr(suite, kind)(make, name=f"{name}, {place}", why=why, dtype=dtype)(program)


def _filled(s, m):
    return s.masked_fill(~m, torch.finfo(s.dtype).min)


def _added(s, m):
    return s + torch.zeros(m.shape, dtype=s.dtype).masked_fill(~m, torch.finfo(s.dtype).min)


_beyond("fill then shift", "the lowest float16 less 100 is minus infinity", _filled, -100.0)
_beyond("sum then shift", "the same of what is added", _added, -100.0)
_beyond("fill then small shift", "the lowest float16 less 8 is itself", _filled, -8.0, "equal")
_beyond("fill then shift up", "more than the lowest number", _filled, 100.0, "equal")
_beyond("fill then shift in bfloat16", "the lowest bfloat16 less 2 is itself", _filled, -2.0, "equal", torch.bfloat16)
