"""Tensors written to while attention is being computed from them, and inputs that the program changes. Not masks."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import INFERENCE, Inputs, Suite
from torch import nn

suite = Suite("mutation")
ONLY = (INFERENCE,)


def frozen(r: Inputs) -> list[torch.Tensor]:
    """q, k, v that need no gradient, so that they may be written to."""
    return [r.randn(2, 3, 6, 8, grad=False) for _ in range(3)]


@suite.equal()
def value_written_before_use(q, k, v):
    """v is written to after the scores and before the product: the new v counts."""
    v = v * 1.0
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    v.mul_(2)
    return p @ v


@suite.equal()
def value_written_through_a_view(q, k, v):
    """A view of v is written to between scores and product."""
    v = v * 1.0
    first = v[..., 0, :]
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    first.zero_()
    return p @ v


@suite.equal(modes=ONLY)
def value_written_after_use(q, k, v):
    """v is written to after the product: the old v counts."""
    v = v.clone()
    out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    v.add_(1)
    return out, v


@suite.equal(modes=ONLY)
def query_written_after_scores(q, k, v):
    """q is written to after the scores, before the softmax: the old q counts."""
    q = q.clone()
    s = q @ k.mT * 8**-0.5
    q.add_(1)
    return s.softmax(-1) @ v, q


@suite.equal(modes=ONLY)
def key_written_after_scores(q, k, v):
    """k is written to after the scores: the old k counts."""
    k = k.clone()
    s = q @ k.mT * 8**-0.5
    k.zero_()
    return s.softmax(-1) @ v, k


@suite.equal(modes=ONLY)
def key_written_through_its_transposition(q, k, v):
    """kᵀ is a view of k; it is written to before the product."""
    k = k.clone()
    kt = k.transpose(-2, -1)
    kt.mul_(0.5)
    return (q @ k.mT).softmax(-1) @ v, k


@suite.equal(modes=ONLY)
def key_written_between_view_and_product(q, k, v):
    """k is written to between its transposition and the product."""
    k = k.clone()
    kt = k.transpose(-2, -1)
    k.mul_(0.5)
    return (q @ kt).softmax(-1) @ v


@suite.equal(modes=ONLY)
def packed_projection_written(q, k, v):
    """q, k and v are slices of one tensor; the slice of q is written to after the scores and overlaps k."""
    x = torch.cat([q, k, v], -1)
    a, b, c = x[..., :8], x[..., 8:16], x[..., 16:]
    s = a @ b.mT
    x[..., 4:20].add_(1)
    return s.softmax(-1) @ c, a @ b.mT


@suite.equal()
def scores_written(q, k, v):
    """Scale, bias and mask all in place: attention."""
    s = q @ k.mT
    s *= 8**-0.5
    s += 1.0
    s.masked_fill_(torch.ones(6, 6).triu(1).bool(), -math.inf)
    return s.softmax(-1) @ v


@suite.equal()
def scores_written_through_a_view(q, k, v):
    """One column of the scores is written to through a view."""
    s = q @ k.mT * 8**-0.5
    s[..., 0].add_(2.0)
    return s.softmax(-1) @ v


@suite.equal()
def scores_set_by_index(q, k, v):
    """One column of the scores is hidden by assignment."""
    s = q @ k.mT * 8**-0.5
    s[..., 1:3] = -math.inf
    return s.softmax(-1) @ v


@suite.equal()
def scores_set_by_mask(q, k, v):
    """s[:, :, mask] = -inf."""
    s = q @ k.mT * 8**-0.5
    s[:, :, torch.ones(6, 6).triu(1).bool()] = -math.inf
    return s.softmax(-1) @ v


@suite.equal()
def scores_written_after_softmax(q, k, v):
    """The scores are zeroed after the softmax, which has its own result."""
    s = q @ k.mT * 8**-0.5
    p = s.softmax(-1)
    s.zero_()
    return p @ v


@suite.decline(modes=ONLY)
def scores_written_and_returned(q, k, v):
    """The scores are changed after the softmax, and returned."""
    s = q @ k.mT * 8**-0.5
    p = s.softmax(-1)
    s.add_(1)
    return p @ v, s


@suite.decline(modes=ONLY)
def probabilities_written(q, k, v):
    """One key's share is zeroed in place."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    p[..., 0] = 0
    return p @ v


@suite.decline(modes=ONLY)
def probabilities_written_through_a_view(q, k, v):
    """One key's share is zeroed through a view that was made before."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    first = p.select(-1, 0)
    first.zero_()
    return p @ v


@suite.equal(modes=ONLY)
def probabilities_written_after_use(q, k, v):
    """The probabilities are zeroed when they have been used."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    out = p @ v
    p.zero_()
    return out


@suite.decline(modes=ONLY)
def probabilities_written_after_use_and_returned(q, k, v):
    """The probabilities are changed when they have been used, and returned."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    out = p @ v
    p.mul_(2)
    return out, p


@suite.decline(modes=ONLY)
def softmax_into_the_scores(q, k, v):
    """softmax(out=) over the scores, which are returned."""
    s = q @ k.mT * 8**-0.5
    torch.softmax(s, -1, out=s)
    return s @ v, s


@suite.equal(modes=ONLY)
def product_into_a_buffer(q, k, v):
    """matmul(out=) into a tensor of the program's own."""
    out = torch.empty(2, 3, 6, 8, dtype=q.dtype)
    torch.matmul((q @ k.mT * 8**-0.5).softmax(-1), v, out=out)
    return out


@suite.equal(modes=ONLY)
def product_into_value(q, k, v):
    """The output is copied over v."""
    v = v.clone()
    out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    v.copy_(out)
    return out, v


@suite.equal()
def output_written(q, k, v):
    """The output is changed in place."""
    out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    out.add_(1)
    return out.mul_(2)


@suite.equal(modes=ONLY)
def output_written_through_a_reshaped_view(q, k, v):
    """The heads are merged (a copy), and the copy is written to: the output itself stays."""
    out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    merged = out.transpose(1, 2).reshape(2, 6, 24)
    merged.add_(1)
    return out, merged


@suite.equal(modes=ONLY)
def output_written_through_a_view(q, k, v):
    """The heads are flattened (a view of eager's contiguous output), and the view is written to."""
    out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    out.view(2, 18, 8).add_(1)
    return out


@suite.equal(modes=ONLY, inputs=frozen)
def inputs_written(q, k, v):
    """All three inputs are written to, q before and the others after."""
    q.mul_(8**-0.5)
    out = (q @ k.mT).softmax(-1) @ v
    k.zero_()
    v.add_(1)
    return out


@suite.equal(modes=ONLY, inputs=frozen)
def input_value_written_between(q, k, v):
    """The input v is written to between scores and product."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    v.neg_()
    return p @ v


def _aliased(r: Inputs) -> list[torch.Tensor]:
    base = r.randn(2, 3, 6, 8, grad=False)
    return [r.randn(2, 3, 6, 8, grad=False), base, base.view(2, 3, 6, 8)]


@suite.equal(modes=ONLY, inputs=_aliased)
def value_aliases_key(q, k, v):
    """k and v share memory; writing to k before the product changes v."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    k.mul_(3)
    return p @ v


@suite.equal(modes=ONLY, inputs=_aliased)
def value_aliases_key_read_only(q, k, v):
    """k and v share memory and nobody writes."""
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@suite.equal(modes=ONLY)
class Cache(nn.Module):
    """A key-value cache as buffers, written at a place and read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 3, 8, 8))
        self.register_buffer("values", torch.zeros(2, 3, 8, 8))

    def forward(self, q, k, v):
        self.keys[:, :, 1:7] = k
        self.values[:, :, 1:7] = v
        s = q @ self.keys.mT * 8**-0.5
        seen = torch.arange(8)[None, :] <= torch.arange(1, 7)[:, None]
        return s.masked_fill(~seen, -math.inf).softmax(-1) @ self.values


@suite.equal(modes=ONLY)
class CacheWrittenBetween(nn.Module):
    """The cache of values is written after the scores were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.randn(2, 3, 6, 8))

    def forward(self, q, k, v):
        p = (q @ k.mT * 8**-0.5).softmax(-1)
        self.values.copy_(v)
        return p @ self.values
