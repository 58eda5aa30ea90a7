"""How a mask or bias broadcasts against the scores, which polarity it has and of what dtype it is."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend

suite = Suite("mask_shapes")

#: Scores are (3, 3, 6, 6), as many sequences as heads: a mask of (3, 6, 6) is the heads' though it may seem a batch's.
SHAPES = (
    (), (1,), (6,), (6, 6), (6, 1), (1, 6), (3, 6, 6), (1, 6, 6), (3, 1, 6), (3, 6, 1), (3, 1, 1), (3, 1, 6, 6),
    (1, 3, 6, 6), (3, 1, 1, 6), (3, 1, 6, 1), (1, 3, 1, 6), (1, 3, 1, 1), (1, 1, 6, 1), (3, 3, 1, 1), (3, 3, 6, 6),
    (1, 1, 1, 1), (1, 1, 1, 6, 6), (2, 1, 1, 6, 6),
)  # fmt: skip


def _keep(*shape: int):
    def draw(r: Inputs) -> list[torch.Tensor]:
        keep = torch.rand(shape, generator=r.generator) < 0.6
        if shape and shape[-1] > 1:
            keep[..., 0] = True  # no row without keys: those are the subject of another module
        else:
            keep = torch.ones_like(keep) if len(shape) < 2 or shape[-2] == 1 else keep
        return [*r.qkv(3, 3, 6, 8), keep]

    return draw


def _bias(*shape: int):
    return lambda r: [*r.qkv(3, 3, 6, 8), r.randn(*shape)]


def masked(q, k, v, keep):
    return (q @ k.mT * 8**-0.5).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


def wanted(q, k, v, keep):
    return torch.where(keep, q @ k.mT * 8**-0.5, -1e9).softmax(-1) @ v


def biased(q, k, v, bias):
    return (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v


for _shape in SHAPES:
    if len(_shape) < 5:  # masked_fill does not broaden the scores
        suite.equal(_keep(*_shape), name=str(_shape), why=f"mask of shape {_shape}")(masked)
    else:
        suite.equal(_keep(*_shape), name=str(_shape), why=f"mask of shape {_shape}")(wanted)
    suite.equal(_bias(*_shape), name=str(_shape), why=f"bias of shape {_shape} that needs its gradient")(biased)


@suite.equal(_bias(6, 6))
def bias_subtracted(q, k, v, bias):
    """Scores minus the bias."""
    return attend(q, k, v, lambda s: s - bias)


@suite.equal(_bias(6, 6))
def scores_subtracted(q, k, v, bias):
    """The bias minus the scores: the scale is negative."""
    return attend(q, k, v, lambda s: bias - s)


@suite.equal(_bias(6, 6))
def bias_before_scale(q, k, v, bias):
    """The bias is scaled as well."""
    return ((q @ k.mT + bias) * 0.25).softmax(-1) @ v


@suite.equal(_bias(6, 6))
def bias_transposed(q, k, v, bias):
    """The bias by (key, query)."""
    return attend(q, k, v, lambda s: s + bias.mT)


@suite.equal(_bias(3, 6, 6))
def bias_batch_first(q, k, v, bias):
    """The bias is per batch, made so by unsqueeze(1)."""
    return attend(q, k, v, lambda s: s + bias.unsqueeze(1))


@suite.equal(_bias(3, 6, 6))
def bias_added_twice(q, k, v, bias):
    """Once per head, once per batch."""
    return attend(q, k, v, lambda s: s + bias + bias[:, None])


@suite.equal(_bias(6, 6))
def bias_reused_after(q, k, v, bias):
    """The bias also counts outside, and its gradient has two parts."""
    return attend(q, k, v, lambda s: s + bias) * bias.sum()


@suite.equal(_bias(3, 1, 1))
def slopes_times_distance(q, k, v, slopes):
    """ALiBi with learned slopes."""
    distance = torch.arange(6)[None, :] - torch.arange(6)[:, None]
    return attend(q, k, v, lambda s: s + slopes * distance.abs().neg())


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.randn(32, 3), r.ints(0, 32, 6, 6)])
def looked_up_bias(q, k, v, table, index):
    """T5's table of relative positions, whose gradient sums over places."""
    return attend(q, k, v, lambda s: s + table[index].permute(2, 0, 1)[None])


_mask66 = _keep(6, 6)


@suite.equal(_mask66)
def wrong_polarity(q, k, v, keep):
    """Masked where the mask is True, though True was meant as keep: the last rows may be empty."""
    return attend(q, k, v, lambda s: s.masked_fill(keep & (torch.arange(6) > 0), -math.inf))


@suite.equal(_mask66)
def double_negation(q, k, v, keep):
    """Not of not."""
    return attend(q, k, v, lambda s: s.masked_fill(~(~keep) == False, -math.inf))  # noqa: E712


@suite.equal(_mask66)
def where_swapped(q, k, v, keep):
    """where(mask, fill, scores)."""
    return attend(q, k, v, lambda s: torch.where(keep, torch.finfo(s.dtype).min, s))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(0, 4, 6, 6)])
def equal_zero_of_ints(q, k, v, m):
    """(m == 0) of a mask that holds 0, 1, 2 and 3."""
    return attend(q, k, v, lambda s: s.masked_fill(m == 0, torch.finfo(s.dtype).min))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(0, 4, 6, 6)])
def equal_one_of_ints(q, k, v, m):
    """(m == 1) of a mask that holds 0, 1, 2 and 3."""
    return attend(q, k, v, lambda s: s.masked_fill(m == 1, torch.finfo(s.dtype).min))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(-1, 3, 6, 6)])
def int_as_bool(q, k, v, m):
    """m.bool(): minus one and two are True as well."""
    return attend(q, k, v, lambda s: s.masked_fill(m.bool(), torch.finfo(s.dtype).min))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.randn(6, 6, grad=False)])
def equal_zero_of_floats(q, k, v, m):
    """(m == 0) of a mask of any floats: nothing is masked."""
    return attend(q, k, v, lambda s: s.masked_fill(m == 0, -math.inf))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(0, 2, 3, 1, 6, 6)])
def equal_zero_expanded(q, k, v, m):
    """(m == 0).expand, with rows that may be empty."""
    return attend(q, k, v, lambda s: s.masked_fill((m == 0).expand(3, 3, 6, 6), -math.inf))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(0, 2, 3, 6)])
def padding_by_query(q, k, v, m):
    """A padding mask hung on the queries' axis: whole rows are empty."""
    return attend(q, k, v, lambda s: s.masked_fill(m[:, None, :, None] == 0, torch.finfo(s.dtype).min))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(0, 2, 3, 6)])
def padding_by_both(q, k, v, m):
    """Padding by query and by key."""
    both = m[:, None, :, None] * m[:, None, None, :]
    return attend(q, k, v, lambda s: s.masked_fill(both == 0, -1e9))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.ints(0, 2, 3, 6)])
def padding_on_heads(q, k, v, m):
    """m[None, :, None]: the axis of three is the heads, not the batch."""
    return attend(q, k, v, lambda s: s.masked_fill(m[None, :, None, :] == 0, -1e9))


@suite.equal(lambda r: [*r.qkv(3, 3, 6, 8), r.bools(6, 6)])
def repeated_mask(q, k, v, keep):
    """The mask repeated to all of batch and heads."""
    return attend(q, k, v, lambda s: s.masked_fill(~keep.repeat(3, 3, 1, 1), -math.inf))


@suite.equal(lambda r: [*r.qkv(6, 6, 8), r.bools(2, 6, 6)])
def mask_repeated_in_tiles(q, k, v, keep):
    """Batch and heads folded into one axis of six; the mask of two batches is tiled, not interleaved."""
    return attend(q, k, v, lambda s: s.masked_fill(~keep.repeat(3, 1, 1), -math.inf))


@suite.equal(lambda r: [*r.qkv(6, 6, 8), r.bools(2, 6, 6)])
def mask_interleaved(q, k, v, keep):
    """The same, interleaved as it should be."""
    return attend(q, k, v, lambda s: s.masked_fill(~keep.repeat_interleave(3, 0), -math.inf))
