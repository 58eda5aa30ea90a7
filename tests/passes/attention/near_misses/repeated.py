"""A tensor of one number, a mask or a floor that repeats what it meets is no scale: the result has another shape."""

from __future__ import annotations

import torch
from attention_near_misses.program import Inputs, Suite

suite = Suite("repeated")


def _one_key(r: Inputs) -> list[torch.Tensor]:
    return [r.randn(2, 4, 6, 8), r.randn(2, 4, 6, 8), r.randn(2, 1, 6, 8)]


def _one_batch(r: Inputs) -> list[torch.Tensor]:
    return [r.randn(1, 6, 8), r.randn(1, 6, 8), r.randn(3, 6, 8)]


@suite.equal(_one_key)
def values_repeated_by_a_number(q, k, v):
    """One head of values for all, twice as large."""
    return (q @ k.mT * 8**-0.5).softmax(-1) @ (v * torch.full((1, 4, 1, 1), 2.0, dtype=v.dtype))


@suite.equal(_one_key)
def values_repeated_beside_a_softcap(q, k, v):
    """The same, where attention in blocks is taken in training."""
    return (torch.tanh(q @ k.mT * 8**-0.5) * 5.0).softmax(-1) @ (v * torch.full((1, 4, 1, 1), 2.0, dtype=v.dtype))


@suite.equal(_one_batch)
def scores_repeated_by_a_number(q, k, v):
    """Scores of one batch for all."""
    return ((q @ k.mT) * torch.full((3, 1, 1), 0.25, dtype=q.dtype)).softmax(-1) @ v


@suite.equal(_one_batch)
def weights_repeated_by_a_number(q, k, v):
    """Weights of one batch for all."""
    return ((q @ k.mT * 8**-0.5).softmax(-1) * torch.full((3, 1, 1), 0.25, dtype=q.dtype)) @ v


@suite.equal(lambda r: [*_one_batch(r), r.bools(3, 6, 6, full="none")])
def scores_repeated_by_a_mask(q, k, v, keep):
    """Scores of one batch for all, each masked in its own way."""
    return (q @ k.mT * 8**-0.5).masked_fill(~keep, -1e9).softmax(-1) @ v


@suite.equal(_one_batch)
def scores_repeated_by_a_floor(q, k, v):
    """Scores of one batch for all, none below the lowest number."""
    lowest = torch.full((3, 1, 1), torch.finfo(q.dtype).min, dtype=q.dtype)
    return torch.maximum(q @ k.mT * 8**-0.5, lowest).softmax(-1) @ v
