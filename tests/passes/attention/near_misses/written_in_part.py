"""Scores of which a part is written to: by slices, at single places, at a mask over some dims, by another name."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite
from torch.nn import functional as F

suite = Suite("written_in_part")

LOWEST = torch.finfo(torch.float32).min


def bools(*shape: int):
    def draw(r: Inputs) -> list[torch.Tensor]:
        return [*r.qkv(), r.bools(*shape)]

    return draw


def _written(name: str, why: str, write, inputs=None, kind: str = "equal", **more) -> None:
    """A program whose scores are changed by `write(scores, ...)` in place."""

    def program(q, k, v, *rest):
        s = q @ k.mT * 8**-0.5
        write(s, *rest)
        return s.softmax(-1) @ v

    args = () if inputs is None else (inputs,)
    getattr(suite, kind)(*args, name=name, why=why, **more)(program)


def _set(*index):
    def write(s, fill=-math.inf):
        s[index] = fill

    return write


_written("the last keys", "a slice of the last dim", _set(..., slice(4, None)))
_written("the first keys", "a slice from the front", _set(..., slice(None, 2)))
_written("keys in the middle", "a slice with both ends", _set(..., slice(2, 4)))
_written("counted from behind", "a slice of negative numbers", _set(..., slice(-3, -1)))
_written("a key", "one place of the last dim", _set(..., 5))
_written("a row's keys", "some keys of one query", _set(slice(None), slice(None), 2, slice(3, None)))
_written("a head's keys", "of one head alone", _set(slice(None), 1, slice(None), slice(3, None)))
_written("a sequence's keys", "of one sequence of the batch", _set(1, slice(None), slice(None), slice(4, None)))
_written("a corner", "some queries and some keys", _set(..., slice(None, 3), slice(3, None)))
_written("a whole row", "a query that sees nothing", _set(slice(None), slice(None), 2))
_written("a whole row of finfo.min", "its weights are alike", lambda s: _set(..., 2, slice(None))(s, LOWEST))
_written("nothing", "an empty slice", _set(..., slice(6, None)))
_written("every second key", "a slice with a step", _set(..., slice(None, None, 2)))
_written("chained", "a slice of a slice", lambda s: s[:, 1:][..., 3:].fill_(-1e9))
_written("to 0", "no number that hides", lambda s: _set(..., slice(3, None))(s, 0.0))
_written("a tensor", "a part of the keys becomes another's", lambda s: _set(..., slice(3, None))(s, s[..., :3].clone()))
_written("added", "a part is made larger", lambda s: s[..., 3:].add_(1.0))
_written("scaled", "a part is scaled", lambda s: s[..., 3:].mul_(0.5))
_written("twice", "two parts, one after another", lambda s: (_set(..., slice(4, None))(s), _set(..., 0)(s, -1e9)))
_written(
    "over each other", "0 where minus infinity was", lambda s: (_set(..., slice(3, None))(s), _set(..., 4)(s, 0.0))
)
_written("a diagonal", "each query's own key", lambda s: s.diagonal(dim1=-2, dim2=-1).fill_(-math.inf))
_written("transposed", "the first queries of a transposed view", lambda s: s.mT[..., :2, :].fill_(-math.inf))
_written("a view of all", "the same elements in another shape", lambda s: s.view(6, 6, 6).mul_(0.5))
_written("a view of all is filled", "as fairseq unfolds heads",
         lambda s, m: s.view(6, 6, 6).masked_fill_(m, -math.inf), bools(6, 6))  # fmt: skip
_written("a part of a view", "a part of the folded heads", lambda s: s.view(6, 6, 6)[4:, :, 3:].fill_(-1e9))
_written(
    "a mask of queries and keys", "behind two dims", lambda s, m: _set(slice(None), slice(None), ~m)(s), bools(6, 6)
)
_written("a mask of keys", "behind an ellipsis", lambda s, m: _set(..., ~m)(s), bools(6))
_written("a mask of the batch", "whole sequences see nothing", lambda s, m: _set(~m)(s, LOWEST), bools(2))
_written("a mask of heads", "of all keys alike", lambda s, m: _set(slice(None), ~m)(s, LOWEST), bools(3))
_written("a mask of heads and queries", "in the middle", lambda s, m: _set(slice(None), ~m)(s, -1e9), bools(3, 6))
_written("a mask, to 0", "no number that hides", lambda s, m: _set(..., ~m)(s, 0.0), bools(6))
_written("a view before", "the view is written to and read", lambda s: s[..., 3:].fill_(-math.inf).add_(0.0))


@suite.equal()
def read_before_it_is_written(q, k, v):
    """The softmax has been taken before a part is hidden."""
    s = q @ k.mT * 8**-0.5
    p = s.softmax(-1)
    s[..., 3:] = -math.inf
    return p @ v, s


@suite.equal()
def a_copy_is_written(q, k, v):
    """A copy of the scores is hidden in part, and the scores are used."""
    s = q @ k.mT * 8**-0.5
    t = s.clone()
    t[..., 3:] = -math.inf
    return s.softmax(-1) @ v, t.softmax(-1)


@suite.equal()
def written_between(q, k, v):
    """A view is taken, the scores are scaled in place, and the view is written to."""
    s = q @ k.mT
    part = s[..., 3:]
    s.mul_(8**-0.5)
    part.fill_(-math.inf)
    return s.softmax(-1) @ v


@suite.equal()
def written_after_the_scale(q, k, v):
    """The scaled scores are another tensor, which the write does not reach."""
    s = q @ k.mT
    t = s * 8**-0.5
    s[..., 3:] = -math.inf
    return t.softmax(-1) @ v, s.exp()


@suite.equal()
def unrecorded(q, k, v):
    """A row is filled where no gradients are recorded: they flow to all of its scores."""
    s = q @ k.mT * 8**-0.5
    with torch.no_grad():
        s[:, :, 2] = LOWEST
    return s.softmax(-1) @ v


@suite.equal()
def a_mask_written_in_part(q, k, v):
    """A mask of ones, zeroed in part; a causal one, opened in part."""
    keep = torch.ones(6, 6, dtype=torch.bool)
    keep[3:, :2] = False
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    causal[:, :2] = True
    return (q @ k.mT).masked_fill(~(keep & causal), -math.inf).softmax(-1) @ v


@suite.equal(dynamic=True, then=(lambda r: r.qkv(2, 3, 9, 8),))
def of_a_dynamic_length(q, k, v):
    """As many keys are hidden as there are queries, less three."""
    s = q @ k.mT * 8**-0.5
    s[..., q.shape[-2] - 3 :] = -math.inf
    return s.softmax(-1) @ v


@suite.decline(lambda r: [*r.qkv(), r.randn(2, 3, 6, 3), r.randn(2, 3, 6, 3)], dtype=torch.float16)
def written_through_an_older_view(q, k, v, other_q, other_k):
    """What is taken off is -65504 by a view from before it was scaled: beside the sink, scores are rounded off."""
    s = q @ k.mT * 0.35
    rest = s[..., 1:]
    s.mul_(0.5)
    rest.fill_(torch.finfo(s.dtype).min)
    s = F.pad(other_q @ other_k.mT / 2 - s, (0, 1), value=-3.0)
    return s.softmax(-1)[..., :-1] @ v
