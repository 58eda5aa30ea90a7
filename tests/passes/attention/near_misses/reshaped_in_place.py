"""Tensors of the program that are given another shape in place; sizes are alike, so that a misread one broadcasts."""

from __future__ import annotations

import torch
from attention_near_misses.program import Inputs, Suite
from torch.utils.checkpoint import checkpoint

suite = Suite("reshaped_in_place")


def alike(r: Inputs) -> list[torch.Tensor]:
    """As many batches as heads, queries, keys and columns; a mask of batch, query and key."""
    return [*r.qkv(4, 4, 4, 4), r.bools(4, 4, 4)]


def biased(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(4, 4, 4, 4), r.randn(4, 4, 4)]


def attend(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep, -1e9).softmax(-1) @ v


@suite.equal(alike)
def unsqueezed_mask(q, k, v, keep):
    """ChatGLM's get_masks."""
    keep = keep.clone()
    keep.unsqueeze_(1)
    return attend(q, k, v, keep)


@suite.equal(alike)
def unsqueezed_by_another_name(q, k, v, keep):
    """The mask has two names, and gets its shape by one of them."""
    keep = keep.clone()
    other = keep
    other.unsqueeze_(1)
    return attend(q, k, v, keep)


@suite.equal(alike)
def unsqueezed_by_an_operator(q, k, v, keep):
    """`torch.ops.aten.unsqueeze_`, as exported programs call it."""
    keep = keep.clone()
    torch.ops.aten.unsqueeze_(keep, 1)
    return attend(q, k, v, keep)


@suite.equal(alike)
def unsqueezed_by_what_casts_nothing(q, k, v, keep):
    """`bool()` of a bool is the same tensor."""
    keep = keep.clone()
    same = keep.bool()
    same.unsqueeze_(1)
    return attend(q, k, v, keep)


@suite.equal(alike)
def unsqueezed_and_written(q, k, v, keep):
    """A view that was taken before is written to behind it, and so is the mask itself."""
    keep = keep.clone()
    part = keep[0]
    keep.unsqueeze_(1)
    part.fill_(True)
    keep[:, :, 0] = True
    return attend(q, k, v, keep)


@suite.equal(alike)
def transposed_mask(q, k, v, keep):
    """Batch and query of a mask change places in place, then it is unsqueezed."""
    keep = keep.clone()
    keep.transpose_(0, 1).unsqueeze_(1)
    return attend(q, k, v, keep)


@suite.equal(lambda r: [*r.qkv(4, 4, 4, 4), r.bools(4, 1, 1, 4)])
def squeezed_mask(q, k, v, keep):
    """A mask of batch and key becomes one of query and key."""
    keep = keep.clone()
    keep.squeeze_()
    return attend(q, k, v, keep)


@suite.equal(alike)
def unsqueezed_by_what_copies_nothing(q, k, v, keep):
    """`contiguous()` of what is contiguous is the same tensor."""
    keep = keep.clone()
    keep.contiguous().unsqueeze_(1)
    return attend(q, k, v, keep)


@suite.equal(biased)
def unsqueezed_bias(q, k, v, bias):
    """A bias that learns."""
    bias = bias * 1.0
    bias.unsqueeze_(1)
    return (q @ k.mT + bias).softmax(-1) @ v


@suite.equal(biased)
def unsqueezed_keys(q, k, v, shared):
    """Keys and values that all heads share."""
    shared = shared * 1.0
    shared.unsqueeze_(1)
    return (q @ shared.mT).softmax(-1) @ shared


@suite.equal(alike)
def scores_and_back(q, k, v, keep):
    """The scores get a dim, and lose it again."""
    s = q @ k.mT
    s.unsqueeze_(1)
    s.squeeze_(1)
    return s.masked_fill(~keep, -1e9).softmax(-1) @ v


@suite.equal(alike)
def scores_of_one_head(q, k, v, keep):
    """Scores of the first head for all heads."""
    s = (q @ k.mT)[:, 0].contiguous()
    s.unsqueeze_(1)
    return s.softmax(-1) @ v


@suite.equal(alike)
def weights_of_one_head(q, k, v, keep):
    """Weights of the first head for all heads."""
    p = (q @ k.mT)[:, 0].softmax(-1).clone()
    p.unsqueeze_(1)
    return p @ v


@suite.equal(alike)
def result_unsqueezed(q, k, v, keep):
    """What attention returns, then added to what broadcasts."""
    out = attend(q, k, v, keep)
    out.unsqueeze_(1)
    return out + q


@suite.equal(alike)
def in_a_checkpoint(q, k, v, keep):
    """All of it computed again in the backward."""

    def inside(q, k, v, keep):
        keep = keep.clone()
        keep.unsqueeze_(1)
        return attend(q, k, v, keep)

    return checkpoint(inside, q, k, v, keep, use_reentrant=False)
