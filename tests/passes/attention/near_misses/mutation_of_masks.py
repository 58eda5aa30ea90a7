"""Masks that are written to before, between or after their use."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite

suite = Suite("mutation_of_masks")


def masked(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.bools(6, 6)]


@suite.equal(masked)
def mask_written_between(q, k, v, keep):
    """The mask is changed after it was applied."""
    keep = keep.clone()
    s = (q @ k.mT * 8**-0.5).masked_fill(~keep, -1e9)
    keep.fill_(True)
    return s.softmax(-1) @ v, keep


@suite.equal(masked)
def mask_written_before(q, k, v, keep):
    """The mask is changed before it is applied, after its negation was taken."""
    keep = keep.clone()
    hidden = ~keep
    keep.zero_()
    return (q @ k.mT * 8**-0.5).masked_fill(hidden, -1e9).softmax(-1) @ v, keep


@suite.equal()
def causal_mask_written(q, k, v):
    """A causal mask made in the program, then one element set."""
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[0, 3] = True
    return (q @ k.mT * 8**-0.5).masked_fill(~keep, -math.inf).softmax(-1) @ v


@suite.equal()
def causal_mask_written_through_a_view(q, k, v):
    """A causal mask made in the program, then its diagonal cleared but for the first."""
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep.diagonal()[1:] = False
    return (q @ k.mT * 8**-0.5).masked_fill(~keep, -math.inf).softmax(-1) @ v


@suite.equal()
def causal_mask_zeroed(q, k, v):
    """A causal mask overwritten by ones."""
    keep = torch.ones(6, 6).tril()
    keep.fill_(1)
    return (q @ k.mT * 8**-0.5).masked_fill(keep == 0, -math.inf).softmax(-1) @ v


@suite.equal()
def causal_bias_scaled(q, k, v):
    """A causal bias of -inf, its future then set to -1 in place."""
    bias = torch.full((6, 6), -math.inf, dtype=q.dtype).triu(1)
    bias.clamp_(min=-1.0)
    return (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v


@suite.equal()
def causal_bias_built_by_copy(q, k, v):
    """copy_ of something else over a causal bias."""
    bias = torch.full((6, 6), -math.inf, dtype=q.dtype).triu(1)
    bias.copy_(torch.arange(36, dtype=q.dtype).view(6, 6) / 36)
    return (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.randn(3)], modes=("training",))
def a_bias_that_learns_partly_written(q, k, v, b):
    """The first key's is set to 0 in place; a gradient flows to the rest, which a softcap's kernel must give, too."""
    bias = b[:, None, None] * torch.ones(3, 6, 6)
    bias[..., 0] = 0
    return (torch.tanh(q @ k.mT / 3.0) * 3.0 + bias).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), *r.qkv()[:2]], modes=("training",))
def scores_that_learn_partly_written(q, k, v, other_q, other_k):
    """Scores of which the first key's are set, taken off others; beside 1e9 all keys of a row count alike."""
    s = other_q @ other_k.mT * 8**-0.5
    s[..., 0] = 0.5
    return (q @ k.mT / 2 - (s - 1e9)).softmax(-1) @ v
