"""Memory written to behind `.data` or `detach()`: a tensor holds what was written, and learns as it did."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_near_misses.program import TRAINING, Inputs, Suite, attend
from torch import nn

suite = Suite("detached")
ONLY = (TRAINING,)


@suite.equal()
def query_scaled(q, k, v):
    """The whole of q through `.data`: q learns as if nothing was written."""
    q = q.clone()
    q.data.mul_(0.7)
    return attend(q, k, v)


@suite.equal()
def key_clamped(q, k, v):
    """The keys of a projection are clamped through `.data`."""
    k = k * 1.5
    k.data.clamp_(-1, 1)
    return attend(q, k, v)


@suite.equal()
def value_of_another(q, k, v):
    """What is added through `detach()` gets no gradient, and v keeps its own."""
    v = v.clone()
    v.detach().add_(k)
    return attend(q, k, v)


@suite.equal()
def through_a_slice_of_all(q, k, v):
    """`q.data[...] = k.data`."""
    q = q.clone()
    q.data[...] = k.data
    return attend(q, k, v)


@suite.equal()
def through_a_view(q, k, v):
    """A view that is older than the write, of another shape."""
    q = q.clone()
    rows = q.view(-1, 8)
    rows.data.mul_(0.5)
    return attend(q, k, v)


@suite.equal()
def in_two_steps(q, k, v):
    """The alias that is written to twice is not the one that is read."""
    k = k.clone()
    alias = k.detach()
    alias.mul_(2)
    alias.sub_(0.1)
    return attend(q, k, v)


@suite.equal()
def alias_read(q, k, v):
    """The detached alias itself is read: no gradient for k."""
    k = k.clone()
    alias = k.detach()
    alias.mul_(2)
    return attend(q, alias, v)


@suite.equal()
def alias_of_what_is_written(q, k, v):
    """Keys are written to, and an older detached alias is read: it holds what was written, and learns nothing."""
    k = k.clone()
    alias = k.detach()
    k.mul_(2)
    return attend(q, alias, v) + k.sum()


@suite.equal()
def two_aliases(q, k, v):
    """What learns is added through one alias, and the other one is read: nothing of it learns."""
    k = k.clone()
    one, other = k.detach(), k.detach()
    one.add_(v)
    return attend(q, other, v)


@suite.equal()
def part_of_value(q, k, v):
    """A part through `.data`: v learns there too."""
    v = v.clone()
    v.data[..., 0, :] = 0.0
    return attend(q, k, v)


@suite.equal()
def scores_masked(q, k, v):
    """Scores masked through `.data`: the gradient of a masked score is 0 all the same, for its weight is."""
    scores = q @ k.mT * 8**-0.5
    scores.data.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


@suite.equal()
def scores_scaled(q, k, v):
    """Scores scaled through `.data`: their gradient is not."""
    scores = q @ k.mT
    scores.data.mul_(0.3)
    return scores.softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.randn(6, 6)])
def bias_shifted(q, k, v, bias):
    """A learnt bias is written to through `.data` before it is added."""
    bias = bias * 1.0
    bias.data.sub_(bias.data.mean())
    return attend(q, k, v, lambda s: s + bias)


@suite.equal(modes=ONLY)
def copied_over(q, k, v):
    """All of k is what has no gradient: k gets zeros, not none."""
    k = k.clone()
    k.copy_(v.detach())
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 5, 8)])
class Prototypes(nn.Module):
    """Learnt keys that are normalised in place in each forward, as codes and prototypes are."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(7, 8))

    def forward(self, x):
        self.codes.data.copy_(F.normalize(self.codes.data, dim=-1))
        return (x @ self.codes.t()).softmax(-1) @ self.codes


def unlearnt(r: Inputs) -> list[torch.Tensor]:
    """q that learns, and keys and values that do not."""
    return [r.randn(2, 3, 6, 8), *(r.randn(2, 3, 6, 8, grad=False) for _ in "kv")]


@suite.equal(unlearnt)
def nothing_to_learn(q, k, v):
    """A cache that needs no gradient, written to through a detached alias."""
    k = k.clone()
    k.detach().mul_(2)
    return attend(q, k, v)
