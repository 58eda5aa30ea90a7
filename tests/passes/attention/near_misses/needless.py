"""Masks that hide nothing, between others: these keep their order, and what is done to the sums stays done."""

from __future__ import annotations

import torch
from attention_near_misses.program import TRAINING, Inputs, Suite, attend

suite = Suite("needless")
ONLY = (TRAINING,)


def blocks(queries: int, keys: int):
    """Queries see the keys of their own block: the last queries see none."""
    return torch.arange(queries)[:, None] // 2 == torch.arange(keys)[None] // 2


def nothing(like, queries: int, keys: int):
    """Numbers of a mask that hides no key, which the sizes say."""
    return (1.0 - (torch.ones(queries, keys).triu(keys) == 0).to(like.dtype)) * -50.0


def with_bias(r: Inputs):
    """Three keys for seven queries, and a bias that learns."""
    return [*r.qkv(1, 4, 7, 8, keys=3), r.randn(1, 1, 1, 3)]


@suite.equal(with_bias, modes=ONLY)
def a_fill_between_a_bias_and_a_needless_mask(q, k, v, b):
    """The fill stops the NaN of a row without a key; behind it stands no bias that would let it through."""
    return attend(q, k, v, lambda s: (s + b).masked_fill(~blocks(7, 3), -torch.inf) + nothing(s, 7, 3))


@suite.equal(with_bias, modes=ONLY)
def a_fill_before_a_needless_mask_and_a_bias(q, k, v, b):
    """The other way round it does not."""
    return attend(q, k, v, lambda s: s.masked_fill(~blocks(7, 3), -torch.inf) + nothing(s, 7, 3) + b)


@suite.equal(with_bias, modes=ONLY)
def a_needless_mask_before_all(q, k, v, b):
    """Nothing is moved."""
    return attend(q, k, v, lambda s: (s + nothing(s, 7, 3) + b).masked_fill(~blocks(7, 3), -torch.inf))


@suite.equal(with_bias)
def a_needless_mask_and_then_a_scale(q, k, v, b):
    """What the sum is multiplied by counts in rows that are computed apart."""
    return attend(q, k, v, lambda s: (s + nothing(s, 7, 3)) * 0.3 + b + ~blocks(7, 3) * -1e9)


@suite.equal(with_bias)
def a_scale_behind_a_bias_and_a_needless_mask(q, k, v, b):
    """The same behind another bias."""
    return attend(q, k, v, lambda s: (s + b + nothing(s, 7, 3)) * 0.3 + ~blocks(7, 3) * -1e9)


@suite.equal(with_bias)
def a_fill_that_is_scaled_behind_a_needless_mask(q, k, v, b):
    """The number that is written has become another when the bias is added."""
    return attend(q, k, v, lambda s: (s.masked_fill(~blocks(7, 3), -3e3) + nothing(s, 7, 3)) * 0.5 + b)


def none(queries: int, keys: int):
    """A mask of which no key is hidden, which the sizes say."""
    return torch.ones(queries, keys).triu(keys) != 0


def weights_where(scores, filled):
    """Weights that are set to zero where `none` hides a score."""
    lowest = torch.finfo(scores.dtype).min
    scores = filled(scores.masked_fill(none(7, 3), lowest), lowest)
    return scores.softmax(-1).masked_fill(none(7, 3), 0.0)


@suite.equal(with_bias)
def weights_zeroed_by_a_needless_mask_and_rows_hidden_by_another(q, k, v, b):
    """The rows that the other mask hides are the mean of the values, and not zeros."""
    return weights_where(q @ k.mT * 0.3, lambda s, lowest: s.masked_fill(~blocks(7, 3), lowest)) @ v


@suite.equal(with_bias)
def weights_zeroed_by_a_needless_mask_behind_numbers_that_hide(q, k, v, b):
    """The rows are computed apart, and nothing is hidden in them."""
    return weights_where(q @ k.mT * 0.3 + b + ~blocks(7, 3) * -1e9, lambda s, lowest: s) @ v


@suite.equal(with_bias)
def weights_zeroed_by_a_needless_mask_and_by_the_one_that_hides(q, k, v, b):
    """Both set weights to zero: the rows are zeros."""
    weights = weights_where(q @ k.mT * 0.3, lambda s, lowest: s.masked_fill(~blocks(7, 3), lowest))
    return weights.masked_fill(~blocks(7, 3), 0.0) @ v
