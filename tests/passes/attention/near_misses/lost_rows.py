"""Rows whose scores are lost beside what is added to them: several masks, uneven numbers, biases beside fills.

The weights of such a row are those of the added numbers alone, and a gradient flows through them all the same.
"""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import TRAINING, Inputs, Suite, attend
from torch.nn import functional as F

suite = Suite("lost_rows")
ONLY = (TRAINING,)
LOW = torch.finfo(torch.float32).min
#: What hides a score: the number that replaces it.
FILLS = {"-inf": -math.inf, "finfo.min": LOW, "-1e9": -1e9}


def causal(q):
    """1 where a key comes after its query."""
    return torch.ones(6, 6).triu(1).to(q.dtype)


def left_padded(dtype=torch.int64):
    """q, k, v and a mask of tokens in which the first sequence has three tokens of padding in front."""

    def draw(r: Inputs):
        tokens = torch.ones(2, 6, dtype=dtype)
        tokens[0, :3] = 0
        return [*r.qkv(), r.leaf(tokens, grad=False) if dtype.is_floating_point else tokens]

    return draw


def uneven(*shape, low=-3):
    """q, k, v and integers, each of which stands for as many times -1e9."""
    return lambda r: [*r.qkv(2, 4, 6, 8), r.ints(low, 0, *shape)]


def with_bias(r: Inputs):
    """q, k, v, a bias that learns, and a mask with rows without a key."""
    return [*r.qkv(2, 4, 6, 8), r.randn(4, 6, 6), r.bools(2, 1, 6, 6, chance=0.3, full="one")]


@suite.equal(left_padded(), modes=ONLY)
def padding_of_integers_and_causal_added(q, k, v, m):
    """Two masks of -1e9: the keys of a padded query carry it once or twice."""
    return attend(q, k, v, lambda s: s + (1.0 - m.to(q.dtype))[:, None, None] * -1e9 + causal(q) * -1e9)


@suite.equal(left_padded(torch.float32), modes=ONLY, dynamic=True)
def padding_of_floats_and_causal_combined(q, k, v, m):
    """The same, added up first, at sizes that are not known."""
    return attend(q, k, v, lambda s: s + ((1.0 - m)[:, None, None] * -1e9 + causal(q) * -1e9))


@suite.equal(left_padded(torch.bool), modes=ONLY)
def padding_of_booleans_and_causal_added(q, k, v, m):
    """The same, with numbers that are known."""
    return attend(q, k, v, lambda s: s + (~m).to(q.dtype)[:, None, None] * -1e9 + causal(q) * -1e9)


@suite.equal(left_padded(torch.float32), modes=ONLY)
def padding_of_the_lowest_and_causal_of_a_billion(q, k, v, m):
    """Two masks of two numbers."""
    return attend(q, k, v, lambda s: s + (1.0 - m)[:, None, None] * LOW + causal(q) * -1e9)


@suite.equal(lambda r: [*r.qkv(), r.ints(0, 3, 2, 6)], modes=ONLY)
def padding_with_twos(q, k, v, m):
    """A 2 in the mask makes +1e9 of what should be 0: scores are lost beside it, too."""
    return attend(q, k, v, lambda s: s + (1.0 - m.to(q.dtype))[:, None, None] * -1e9)


@suite.equal(uneven(2, 1, 6, 6), modes=ONLY)
def uneven_rows(q, k, v, m):
    """Every key hidden, some more than others."""
    return attend(q, k, v, lambda s: s + m.to(q.dtype) * 1e9)


@suite.equal(uneven(1, 4, 1, 6), modes=ONLY)
def uneven_keys_per_head_grouped(q, k, v, m):
    """The same for all queries, and heads that share keys."""
    k, v = (t[:, :2].repeat_interleave(2, 1) for t in (k, v))
    return attend(q, k, v, lambda s: s + m.to(q.dtype) * 1e9)


def _per_fill(name, fill):
    @suite.equal(uneven(2, 1, 6, 6, low=-2), name=f"uneven rows, causal {name}", modes=ONLY)
    def program(q, k, v, m):
        """Some keys of every row are replaced, all others are lost."""
        return attend(q, k, v, lambda s: (s + m.to(q.dtype) * 1e9).masked_fill(causal(q).bool(), fill))

    @suite.equal(with_bias, name=f"bias that learns, padding {name}")
    def program(q, k, v, b, m):  # noqa: F811
        """A bias of any size beside a fill, with rows that have no key at all."""
        return attend(q, k, v, lambda s: (s + b).masked_fill(~m, fill))

    @suite.equal(with_bias, name=f"bias with holes, causal {name}")
    def program(q, k, v, b, m):  # noqa: F811
        """Minus infinity in the bias, for all that the other mask keeps of a row."""
        b = b.masked_fill(~m[:1, 0], -math.inf)
        return attend(q, k, v, lambda s: (s + b).masked_fill(causal(q).bool(), fill))

    @suite.equal(with_bias, name=f"bias with holes after padding {name}", modes=ONLY)
    def program(q, k, v, b, m):  # noqa: F811
        """What is added after the fill makes minus infinity of it, for whole rows."""
        b = b.masked_fill(~m[:1, 0].roll(1, -1), -math.inf)
        return attend(q, k, v, lambda s: s.masked_fill(~m, fill) + b)

    @suite.equal(with_bias, name=f"bias beside {name}, zeroed")
    def program(q, k, v, b, m):  # noqa: F811
        """Weights are set to zero where scores were masked: rows without a key are zeros."""
        return attend_zeroed(q, k, v, lambda s: (s + b).masked_fill(~m, fill), m)


def attend_zeroed(q, k, v, change, m):
    return change(q @ k.mT * 8**-0.5).softmax(-1).masked_fill(~m, 0.0) @ v


for _name, _fill in FILLS.items():
    _per_fill(_name, _fill)


@suite.decline(lambda r: [*r.qkv(), -r.ints(0, 2, 2, 1, 6, 1).expand(2, 1, 6, 6), r.bools(2, 1, 6, 6)])
def zeroed_beside_a_mask_as_low(q, k, v, b, m):
    """Where both masks have the same number, the keys that are set to zero had a share of the weights."""
    return attend_zeroed(q, k, v, lambda s: (s + b.to(q.dtype) * -LOW).masked_fill(~m, LOW), m)


def beside_infinities(q, k, v, b, m):
    """Minus infinity for all keys of a row is NaN, but where both masks have it."""
    return attend_zeroed(q, k, v, lambda s: (s + b.to(q.dtype).log()).masked_fill(~m, -math.inf), m)


def whole_rows(r):
    return [*r.qkv(), r.ints(0, 2, 2, 1, 6, 1).expand(2, 1, 6, 6), r.bools(2, 1, 6, 6) & r.bools(2, 1, 6, 1)]


suite.equal(whole_rows, name="zeroed beside a mask of infinities", modes=("inference",))(beside_infinities)
suite.decline(whole_rows, name="zeroed beside a mask of infinities, training", modes=ONLY)(beside_infinities)


@suite.equal(left_padded(), modes=ONLY)
def causal_replaced_padding_added(q, k, v, m):
    """GPT-2 as it was: the lowest number in place of later keys, and added for padding."""
    scores = (q @ k.mT * 8**-0.5).where(causal(q) == 0, LOW)
    return (scores + (1.0 - m[:, None, None].to(q.dtype)) * LOW).softmax(-1) @ v


@suite.decline(lambda r: [*r.qkv(), F.one_hot(r.ints(0, 2, 2, 6), 2), r.bools(2, 1, 6, 6)])
def mask_made_by_a_product_zeroed(q, k, v, documents, m):
    """A product of zeros and ones that is multiplied by the lowest number is a mask as low as the fill."""
    documents = documents.to(q.dtype)
    others = (documents @ documents.flip(-1).mT)[:, None]
    return attend_zeroed(q, k, v, lambda s: (s + others * LOW).masked_fill(~m, LOW), m)


@suite.decline()
def minus_infinity_taken_off(q, k, v):
    """A mask of minus infinity in what is taken off is plus infinity, and NaN."""
    hidden = torch.zeros(6, 6, dtype=q.dtype).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    return (1.0 - (q @ k.mT * 0.3 + hidden)).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")], dtype=torch.float64)
def as_low_in_float64(q, k, v, m):
    """float64 loses no score beside -1e9: those that it is added to and those that it replaces differ."""
    scores = q @ k.mT * 0.3 + (1.0 - causal(q).mT.to(q.dtype)) * -1e9
    return scores.masked_fill(~m, -1e9).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.ints(0, 2, 2, 1, 6, 6)])
def lost_and_brought_back(q, k, v, m):
    """One mask raises a score by so much that it is lost, and another lowers it again: what is left is zero."""
    low = causal(q) * LOW
    return attend(q, k, v, lambda s: s - m.to(q.dtype) * LOW + low)


@suite.equal(left_padded(), modes=ONLY, dtype=torch.bfloat16)
def by_the_logarithm_of_the_sum(q, k, v, m):
    """Reformer's softmax: beside -1e5 the logarithm of what is added up is rounded off."""
    s = (q @ k.mT * 8**-0.5).masked_fill((m == 0)[:, None, :, None], -1e5)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


@suite.equal(lambda r: [*r.qkv(), r.randn(6), r.bools(2, 1, 6, 1), r.bools(2, 3, 6, 6)], dtype=torch.float64)
def lowest_of_float64_twice(q, k, v, b, m, n):
    """The lowest number of float64 fills twice beside a bias; float32 cannot hold it."""
    low = torch.finfo(q.dtype).min
    return attend(q, k, v, lambda s: (s - b).masked_fill(~m, low).masked_fill(~n, low))


@suite.equal(lambda r: [*r.qkv(), r.randn(2, 3, 6, 6), r.bools(2, 1, 1, 6)], dtype=torch.float64)
def replaced_and_added_then_scaled(q, k, v, b, m):
    """float64 keeps what is left beside -1e9; the scale that follows makes the fill half of that."""
    return attend(q, k, v, lambda s: ((s + causal(q) * -1e9).masked_fill(~m.flip(-1), -1e9) + b) * 0.5)


@suite.equal(lambda r: [*r.qkv(), r.ints(0, 2, 6, 6)], dtype=torch.float16)
def raised_by_a_caller(q, k, v, raised):
    """Numbers from outside that raise scores to where float16 rounds them to steps of 8."""
    return attend(q, k, v, lambda s: s * 4 + raised.to(s.dtype) * 1e4)


@suite.equal(with_bias)
def sums_then_scaled(q, k, v, b, m):
    """The scale comes last, as in Transformer-XL, and is no power of two: what is left beside -1e9 is rounded again."""
    scores = (q @ k.mT + (1.0 - m.to(q.dtype)) * -1e9) / 3 + b
    return (scores * 0.7).masked_fill(causal(q).bool(), LOW).softmax(-1) @ v


@suite.equal(with_bias, dtype=torch.bfloat16)
def replaced_then_biased_then_scaled(q, k, v, b, m):
    """What replaced a score is scaled with the bias that was added to it."""
    return ((((q @ k.mT).masked_fill(~m, -1e9) + b) * 0.3) + (1.0 - m.to(q.dtype)) * -1e4).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(2, 4, 6, 8), r.randn(4, 6, 8), r.bools(2, 1, 6, 6, full="one")])
def two_products_then_scaled(q, k, v, p, m):
    """The second product is a bias, for as one product they are rounded once less."""
    return ((q @ k.mT + q @ p.mT + (1.0 - m.to(q.dtype)) * -1e9) / 3).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")])
def distances_beside_a_mask(q, k, v, m):
    """ALiBi and -1e9: scores and distances are rounded to steps of 64 as one sum, not each."""
    distance = (torch.arange(6)[None] - torch.arange(6)[:, None]).abs().to(q.dtype) * -20.0
    return (q @ k.mT * 9 + distance + (1.0 - m.to(q.dtype)) * -1e9).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")])
def scaled_beside_a_mask(q, k, v, m):
    """The scale comes after the sum, whose steps of 64 it makes steps of 19."""
    return ((q @ k.mT * 30 + (1.0 - m.to(q.dtype)) * -1e9) * 0.3).softmax(-1) @ v
