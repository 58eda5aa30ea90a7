"""Axes and ranks: what is transposed, folded, broadcast or packed, and what meets what in consequence."""

from __future__ import annotations

import torch
from attention_near_misses.program import Suite, attend, cross

suite = Suite("layouts")


@suite.equal(lambda r: r.qkv(2, 2, 3, 5, 8))
def five_axes(q, k, v):
    """Windows as an axis of their own."""
    return attend(q, k, v)


@suite.equal(lambda r: r.qkv(2, 2, 1, 3, 5, 8))
def six_axes(q, k, v):
    """Two axes more."""
    return attend(q, k, v)


@suite.equal(lambda r: [*r.qkv(2, 2, 3, 5, 8), r.randn(3, 5, 5)])
def five_axes_with_bias(q, k, v, bias):
    """Swin: windows, and a bias per head."""
    return attend(q, k, v, lambda s: s + bias)


@suite.equal(lambda r: [*r.qkv(4, 3, 5, 8), r.bools(2, 5, 5)])
def windows_seen_and_unseen(q, k, v, keep):
    """Swin's shifted windows: the batch is split into images and windows for the mask alone."""
    s = q @ k.mT * 8**-0.5
    s = s.view(2, 2, 3, 5, 5).masked_fill(~keep[None, :, None], -100.0).view(4, 3, 5, 5)
    return s.softmax(-1) @ v


@suite.equal(lambda r: r.qkv(5, 8))
def two_axes(q, k, v):
    """Matrices."""
    return attend(q, k, v)


@suite.equal(lambda r: r.qkv(4, 5, 8))
def three_axes(q, k, v):
    """Three axes."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(8), r.randn(5, 8), r.randn(5, 8)])
def a_vector_as_query(q, k, v):
    """One query without an axis."""
    return (k @ q * 8**-0.5).softmax(-1) @ v


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(6, 8), r.randn(6, 8)])
def matrices_as_keys(q, k, v):
    """k and v are shared by all."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(6, 8), r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8)])
def matrix_as_query(q, k, v):
    """Learned queries shared by all, as in a perceiver."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(1, 3, 4, 8), r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8)])
def broadcast_batch_of_query(q, k, v):
    """One query for the batch."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(1, 3, 6, 8), r.randn(2, 3, 6, 8)])
def broadcast_batch_of_key(q, k, v):
    """One k for the batch, a v each."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(1, 3, 6, 8), r.randn(1, 3, 6, 8), r.randn(2, 3, 6, 8)])
def broadcast_batch_of_scores(q, k, v):
    """One map for the batch: the output is larger than the scores."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 1, 6, 8), r.randn(2, 1, 6, 8), r.randn(2, 3, 6, 8)])
def broadcast_heads_of_scores(q, k, v):
    """One map for three heads of v."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 1, 6, 8), r.randn(1, 3, 6, 8), r.randn(2, 3, 6, 8)])
def broadcast_both_ways(q, k, v):
    """q is broadcast over heads, k over the batch."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 5)])
def value_of_another_width(q, k, v):
    """v has five features."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 1)])
def value_of_one_feature(q, k, v):
    """v has one feature."""
    return attend(q, k, v)


@suite.equal(lambda r: [*r.qkv(2, 3, 6, 8)[:2], r.randn(2, 3, 6)])
def value_without_features(q, k, v):
    """v is a number per key."""
    return ((q @ k.mT * 8**-0.5).softmax(-1) * v[..., None, :]).sum(-1)


@suite.equal(lambda r: r.qkv(2, 8, 8, 8))
def key_reshaped_for_transposed(q, k, v):
    """reshape instead of transpose: all sizes agree, the elements do not."""
    return (q @ k.reshape(2, 8, 8, 8) * 8**-0.5).softmax(-1) @ v


@suite.equal(lambda r: r.qkv(2, 8, 8, 8))
def key_not_transposed(q, k, v):
    """q k without the transposition."""
    return (q @ k * 8**-0.5).softmax(-1) @ v


@suite.equal(lambda r: r.qkv(8, 8, 8, 8))
def key_permuted_wrongly(q, k, v):
    """The permutation moves the heads too."""
    return (q @ k.permute(0, 3, 1, 2) * 8**-0.5).softmax(-1) @ v


@suite.equal(lambda r: r.qkv(8, 8, 8, 8))
def key_permuted_with_batch(q, k, v):
    """Batch and heads of k exchanged."""
    return (q @ k.permute(1, 0, 3, 2) * 8**-0.5).softmax(-1) @ v


@suite.equal(lambda r: r.qkv(2, 8, 8, 8))
def value_transposed(q, k, v):
    """p vᵀ, with v square."""
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v.mT


@suite.equal(lambda r: r.qkv(8, 8, 8, 8))
def value_transposed_over_heads(q, k, v):
    """Heads and keys of v exchanged."""
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v.transpose(1, 2)


@suite.equal(lambda r: r.qkv(6, 6, 6, 8))
def output_transposed_wrongly(q, k, v):
    """The output's batch and heads exchanged, then merged."""
    return attend(q, k, v).transpose(0, 1).reshape(6, 6, 48)


@suite.equal(lambda r: r.qkv(2, 3, 6, 8))
def output_merged_without_transposition(q, k, v):
    """reshape without transpose(1, 2): heads and queries are mixed, and so they must stay."""
    return attend(q, k, v).reshape(2, 6, 24)


@suite.equal(cross)
def output_transposed(q, k, v):
    """(vᵀ pᵀ) by product of transpositions."""
    return v.mT @ (q @ k.mT * 8**-0.5).softmax(-1).mT


@suite.equal(lambda r: [r.randn(2, 6, 3, 8), r.randn(2, 6, 3, 8), r.randn(2, 6, 3, 8)])
def heads_and_sequence_not_exchanged(q, k, v):
    """(b, s, h, d) without transposition: attention among the heads of one token."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(6, 2, 24), r.randn(6, 2, 24), r.randn(6, 2, 24)])
def sequence_first(q, k, v):
    """(s, b, h d) as in fairseq: view(s, b h, d).transpose(0, 1)."""
    q, k, v = (x.view(6, 6, 8).transpose(0, 1) for x in (q, k, v))
    return attend(q, k, v).transpose(0, 1).reshape(6, 2, 24)


@suite.equal(lambda r: [r.randn(6, 2, 24), r.randn(6, 2, 24), r.randn(6, 2, 24)])
def sequence_taken_for_batch(q, k, v):
    """(s, b, h d) taken for (b, s, h d): attention over the batch."""
    q, k, v = (x.view(6, 2, 3, 8).transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v)


@suite.equal(lambda r: r.qkv(5, 3, 6, 8))
def over_the_batch(q, k, v):
    """Attention over the batch axis, as in axial and set models."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return attend(q, k, v).permute(2, 0, 1, 3)


@suite.equal(lambda r: [r.randn(2, 6, 72)])
def packed_in_threes(x):
    """qkv packed as (s, 3, h, d)."""
    q, k, v = x.view(2, 6, 3, 3, 8).permute(2, 0, 3, 1, 4)
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 6, 72)])
def packed_by_head(x):
    """qkv packed as (s, h, 3, d), as in GPT-NeoX and Bloom: the same sizes as the other order."""
    q, k, v = x.view(2, 6, 3, 3, 8).permute(3, 0, 2, 1, 4)
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 6, 72)])
def packed_interleaved(x):
    """qkv packed as (s, h, d, 3)."""
    q, k, v = x.view(2, 6, 3, 8, 3).permute(4, 0, 2, 1, 3)
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 6, 3, 8), *r.qkv()[1:], r.randn(6, 1)], modes=("training",))
def two_softmaxes_turned(q, k, v, bias):
    """Weights side by side, vᵀ from the left: beside a bias that learns SDPA lays out its result otherwise."""
    s = q.transpose(1, 2) @ k.mT + bias
    p = torch.cat([s[..., :3].softmax(-1), s[..., 3:].softmax(-1)], -1)
    return (v.mT @ p.mT).mT.transpose(1, 2).reshape(2, 6, 24)
