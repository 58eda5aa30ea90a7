"""Scores of which a part is written to: by slices, at single places, at a mask over some dims, by another name."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import INFERENCE, Inputs, Suite
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


# ---- what is added to a part ------------------------------------------------------------------------------------


def biased(*shape: int):
    return lambda r: [*r.qkv(), r.randn(*shape)]


def _added(s, b):
    s[..., 2:] += b


def _set_to_a_sum(s, b):
    s[..., 2:] = b + s[..., 2:]


def _set_to_a_sum_of_others(s, b):
    s[..., 2:] = s[..., 1:-1] + b


def _set_to_more_than_a_sum(s, b):
    s[..., 2:] = 2 * s[..., 2:] + b


def _in_another_shape(s, b):
    part = s[:, :, 2:, 2:]
    s[:, :, 2:, 2:] = (part.view(2, 3, 2, 2, 2, 2) + b[:, :, :, None] - 0.5 * b[:, :, None]).view(2, 3, 4, 4)


def _all_of_it(s, b):
    s[:, :, 0:, 0:] = s[:, :, 0:, 0:] + b


def _all_of_it_in_another_dtype(s, b):
    s[:] = (s.double() + b).to(torch.bfloat16)


def _overlapping(s, b):
    s[..., :4] += b
    s[..., 2:] -= 2 * b


def _scaled_between(s, b):
    t = s[..., 2:] + b
    s.mul_(2.0)
    s[..., 2:] = t


def _changed_between(s, b):
    c = b * 1
    t = s[..., 2:] + c
    c.mul_(3)
    s[..., 2:] = t


def _changed_after(s, b):
    c = b * 1
    s[..., 2:] += c
    c.mul_(3)


def _hidden_then_added(s, b):
    s[..., 4:] = -math.inf
    s[..., 2:] += b


_written("added, a tensor", "of some keys, through a view", lambda s, b: s[..., 2:].add_(b, alpha=0.5), biased(6, 4))
_written("added to a slice", "a part is made more", _added, biased(2, 3, 6, 4))
_written("a sum", "a part becomes more than it was", _set_to_a_sum, biased(4))
_written("a sum of others", "a part becomes more than another part was", _set_to_a_sum_of_others, biased(4))
_written("more than a sum", "a part is scaled, too", _set_to_more_than_a_sum, biased(4))
_written("a sum in another shape", "as MViT adds distances", _in_another_shape, biased(2, 3, 2, 2, 2))
_written("a sum over all", "the slice is all there is", _all_of_it, biased(3, 6, 6))
_written("a sum that is cast", "all of it is rounded", _all_of_it_in_another_dtype, biased(3, 6, 6))
_written("sums that overlap", "one part after another", _overlapping, biased(6, 4))
_written("scaled before it is written", "the sum is of what was", _scaled_between, biased(4))
_written("another bias by then", "what was added is something else now", _changed_between, biased(4))
_written("another bias behind", "what was added is something else behind it", _changed_after, biased(4))
_written("hidden, then added", "minus infinity stays what it is", _hidden_then_added, biased(4))
_written("every second, added", "a slice with a step", lambda s, b: s[..., ::2].add_(b), biased(3))
_written("a row, added", "one query", lambda s, b: s[:, :, 2].add_(b), biased(6))
_written("a wider sum", "the bias is in float64", lambda s, b: s[..., 2:].add_(b.double()), biased(4))


@suite.equal(biased(4))
def added_unrecorded(q, k, v, b):
    """A bias is added where no gradients are recorded: none flow to it."""
    s = q @ k.mT * 8**-0.5
    with torch.no_grad():
        s[..., 2:] += b
    return s.softmax(-1) @ v


@suite.equal(biased(4), dynamic=True, then=(lambda r: [*r.qkv(2, 3, 9, 8), r.randn(7)],))
def added_to_a_dynamic_length(q, k, v, b):
    """All keys but two."""
    s = q @ k.mT * 8**-0.5
    s[..., 2:] += b
    return s.softmax(-1) @ v


# ---- other places -----------------------------------------------------------------------------------------------

QUERIES, KEYS = torch.triu_indices(6, 6, 1)


def _at(*index: object):
    def write(s, fill=-math.inf):
        s[(slice(None), slice(None), *index)] = fill

    return write


_written("every third key", "a slice with a step and a start", _set(..., slice(1, None, 3)))
_written("every second of every second", "steps of steps", lambda s: s[..., ::2][..., ::2].fill_(-1e9))
_written("a diagonal above", "each query's next key", lambda s: s.diagonal(1, -2, -1).fill_(-math.inf))
_written("a diagonal of heads", "of heads and queries", lambda s: s[:, :, :3].diagonal(0, 1, 2).fill_(-1e9))
_written("a part of a diagonal", "its first places", lambda s: s.diagonal(0, -2, -1)[..., :3].fill_(-1e9))
_written("indices of a triangle", "integers for queries and keys: causal", _at(QUERIES, KEYS))
_written("indices of almost a triangle", "one is missing", _at(QUERIES[1:], KEYS[1:]))
_written("indices the wrong way round", "queries and keys exchanged", lambda s: _at(KEYS, QUERIES)(s, -1e9))
_written("indices of keys", "integers for keys alone", _at(slice(None), torch.tensor([5, 3, -2])))
_written("indices in a list", "numbers of the program", lambda s: _at(slice(None), [5, 3])(s))
_written("indices, to 0", "no number that hides", lambda s: _at(QUERIES, KEYS)(s, 0.0))
_written("indices, added", "a number is added at places", lambda s: s.index_put_((torch.tensor([1]),), s.new_ones(()),
                                                                                accumulate=True))  # fmt: skip
_written("indices, others", "other numbers at places", lambda s: _at(QUERIES, KEYS)(s, torch.full((15,), -1e9)))
_written("index_fill", "keys by their places", lambda s: s.index_fill_(-1, torch.tensor([1, 4]), -math.inf))


@suite.equal(lambda r: [*r.qkv(), r.ints(0, 6, 3)])
def filled_at_given_keys(q, k, v, keys):
    """Which keys are hidden is an input; the filled scores are a copy."""
    s = q @ k.mT * 8**-0.5
    return s.index_fill(-1, keys, -1e9).softmax(-1) @ v, s.logsumexp(-1)


@suite.equal(lambda r: [*r.qkv(), r.ints(0, 6, 3)], modes=(INFERENCE,))
def indices_changed_behind(q, k, v, keys):
    """The places are something else behind the write."""
    keys = keys.clone()
    s = q @ k.mT * 8**-0.5
    s[:, :, :, keys] = -1e9
    keys.add_(1)
    return s.softmax(-1) @ v, keys
