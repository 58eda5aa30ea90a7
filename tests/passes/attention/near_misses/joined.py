"""Scores that are a sum of products: what may become one product of longer vectors, and what is only nearly that."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend, in_dtype

suite = Suite("joined")
LOW = torch.finfo(torch.float32).min


def two(r: Inputs) -> list[torch.Tensor]:
    """q, k, v, and queries and keys of another kind, five numbers each."""
    return [*r.qkv(), r.randn(2, 3, 6, 5), r.randn(2, 3, 6, 5)]


def with_mask(r: Inputs) -> list[torch.Tensor]:
    return [*two(r), r.bools(2, 1, 6, 6, full="one")]


def pair(r: Inputs) -> list[torch.Tensor]:
    return [*two(r), r.randn(2, 3, 6, 4)]


@suite.equal(two)
def weighted_difference(q, k, v, r, s):
    """Half of one product less three times the other."""
    return ((q @ k.mT) / 2 - 3 * (r @ s.mT)).softmax(-1) @ v


@suite.equal(two, dtype=torch.float16)
def capped_with_a_row_without_a_key(q, k, v, r, s):
    """The sum is capped, and then rounded off beside -1e4 in the first row."""
    scores = 3.0 * ((q @ k.mT * 0.25 - 0.3 * (r @ s.mT)) / 3.0).tanh()
    low = torch.zeros(6, 6, dtype=q.dtype).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(), -1e4)
    return (scores + low).softmax(-1) @ v


@suite.equal(two)
def three_of_them(q, k, v, r, s):
    """A sum of three, of which one is of the same vectors as another."""
    return (0.1 * (q @ k.mT) + (r @ s.mT + (k @ q.mT) * -0.2)).softmax(-1) @ v


@suite.equal(two)
def keys_on_queries(q, k, v, r, s):
    """The second product transposed: its keys are on the left."""
    return attend(q, k, v, lambda scores: scores + (s @ r.mT).mT)


@suite.equal(lambda r: [*r.qkv(2, 4, 6, 8), r.randn(2, 4, 6, 5), r.randn(2, 6, 5)])
def shared_keys(q, k, v, r, s):
    """Latent attention: all heads share the keys of positions."""
    return attend(q, k, v, lambda scores: torch.einsum("bhqd,bkd->bhqk", r, s) + scores)


@suite.equal(lambda r: [*r.qkv(), r.randn(6, 5), r.randn(3, 6, 5)])
def positions_alone(q, k, v, r, s):
    """The second product lacks the batch: it is a bias."""
    return attend(q, k, v, lambda scores: scores + r @ s.mT)


@suite.equal(with_mask)
def masked_before_the_sum(q, k, v, r, s, keep):
    """The second product is masked by itself, and whole rows with it."""
    return attend(q, k, v, lambda scores: scores + (r @ s.mT).masked_fill(~keep, LOW))


@suite.equal(with_mask)
def masked_after_the_sum(q, k, v, r, s, keep):
    """Rows without a key beside a sum of products."""
    return attend(q, k, v, lambda scores: (scores + r @ s.mT).masked_fill(~keep, torch.finfo(q.dtype).min))


@suite.equal(with_mask)
def mask_between(q, k, v, r, s, keep):
    """The mask is added to the first product, before the second is."""
    return attend(q, k, v, lambda scores: scores + (~keep).to(q.dtype) * LOW + r @ s.mT)


@suite.equal(two)
def capped_together(q, k, v, r, s):
    """A softcap of the sum."""
    return attend(q, k, v, lambda scores: torch.tanh((scores + r @ s.mT) / 3) * 3)


@suite.equal(two)
def capped_apart(q, k, v, r, s):
    """The second product is capped, the first is not."""
    return attend(q, k, v, lambda scores: scores + torch.tanh(r @ s.mT))


@suite.equal(lambda r: [*two(r), r.randn(3, 1, 1)])
def temperature_of_one(q, k, v, r, s, t):
    """Only the first product is multiplied by a tensor."""
    return attend(q, k, v, lambda scores: scores * t + r @ s.mT)


@suite.equal(lambda r: [*r.qkv(), r.randn(2, 3, 6, 260, scale=0.2), r.randn(2, 3, 6, 260, scale=0.2)])
def too_long(q, k, v, r, s):
    """More numbers than kernels take: the second product is a bias."""
    return attend(q, k, v, lambda scores: scores + r @ s.mT)


@suite.equal(two)
def other_factor_of_a_product(q, k, v, r, s):
    """A product times a product is no sum."""
    return attend(q, k, v, lambda scores: scores * (r @ s.mT))


@suite.equal(pair)
def two_sums_of_the_same(q, k, v, r, s, w):
    """LiLT: both softmaxes read both products, each in its own proportion."""
    a, b = q @ k.mT / math.sqrt(8), r @ s.mT / math.sqrt(5)
    return (a + b).softmax(-1) @ v, (b * 0.3 + a).softmax(-1) @ w


@suite.decline(pair)
def two_sums_of_which_one_is_seen(q, k, v, r, s, w):
    """The products are returned as well: they are made in any case."""
    a, b = q @ k.mT / math.sqrt(8), r @ s.mT / math.sqrt(5)
    return (a + b).softmax(-1) @ v, (b + a).softmax(-1) @ w, a, b


@suite.decline(pair)
def two_softmaxes_one_over_queries(q, k, v, r, s, w):
    """The second softmax is no attention, and what it reads is made for it."""
    a, b = q @ k.mT / math.sqrt(8), r @ s.mT / math.sqrt(5)
    return (a + b).softmax(-1) @ v, (b + a).softmax(-2) @ w


@suite.equal(two)
def second_without_gradient(q, k, v, r, s):
    """The second product passes no gradient: it is a bias."""
    with torch.no_grad():
        other = r @ s.mT
    return attend(q, k, v, lambda scores: scores + other)


@suite.equal(two)
def second_used_elsewhere(q, k, v, r, s):
    """The second product is returned, and made in any case: it is a bias."""
    other = r @ s.mT
    return attend(q, k, v, lambda scores: scores + other), other.sum(-1)


@suite.equal(lambda r: [*r.qkv(2, 4, 6, 8), r.randn(2, 2, 6, 5), r.randn(2, 2, 6, 5)])
def heads_in_turn(q, k, v, r, s):
    """Heads share the second product, every other one the same."""
    return attend(q, k, v, lambda scores: scores + (r @ s.mT).repeat(1, 2, 1, 1))


suite.programs += in_dtype(
    [p for p in suite if p.name.endswith(("difference", "shared_keys", "of_the_same", "after_the_sum"))], torch.bfloat16
)
