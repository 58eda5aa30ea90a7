"""Numbers and tensors added to the scores, subtracted from them, and what the scores are subtracted from."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Suite, in_dtype, plus, square

suite = Suite("sums")
HIDDEN = torch.ones(6, 6).triu(1).bool()


def _masked(s):
    return s.masked_fill(HIDDEN, -math.inf)


#: (name, what becomes of the scores)
NUMBERS = (
    ("s + 2", lambda s: s + 2.0),
    ("2 + s", lambda s: 2 + s),
    ("s - 2", lambda s: s - 2.0),
    ("2 - s", lambda s: 2.0 - s),
    ("add alpha", lambda s: torch.add(s, 2.0, alpha=-3)),
    ("sub alpha", lambda s: s.sub(2.0, alpha=3)),
    ("rsub", lambda s: torch.rsub(s, 2.0)),
    ("rsub alpha", lambda s: torch.rsub(s, 2.0, alpha=0.5)),
    ("rsub negative alpha", lambda s: torch.rsub(s, 2.0, alpha=-1)),
    ("rsub alpha of zero", lambda s: torch.rsub(s, 2.0, alpha=0)),
    ("in place", lambda s: s.clone().sub_(2.0)),
    ("1 - (1 - s)", lambda s: 1.0 - (1.0 - s)),
    ("-(s + 1)", lambda s: -(s + 1.0)),
    ("2 / s", lambda s: 2.0 / (s.square() + 1.0)),
    ("s times zero", lambda s: s * 0.0),
    ("s / -2", lambda s: s / -2),
    ("lerp", lambda s: torch.lerp(s, torch.zeros_like(s), 0.5)),
    ("a large number", lambda s: s + 3e4),
    ("a number that drowns the scores", lambda s: s - 1e9),
    ("a number that drowns the scores, alpha", lambda s: s.add(1e8, alpha=-10)),
    ("infinity", lambda s: s + math.inf),
    ("NaN", lambda s: s - math.nan),
    ("number minus masked", lambda s: 1.0 - _masked(s)),
    ("rsub of masked", lambda s: torch.rsub(_masked(s), 1.0)),
    ("masked, then shifted", lambda s: _masked(s) - 3.0),
    ("shifted, then masked", lambda s: _masked(3.0 - s)),
    ("masked by -1e9, then drowned", lambda s: s.masked_fill(HIDDEN, -1e9) - 1e9),
    ("capped, then turned round", lambda s: 1.0 - torch.tanh(s / 5.0) * 5.0),
    ("turned round, then capped", lambda s: torch.tanh((1.0 - s) / 5.0) * 5.0),
)
TENSORS = (
    ("s + b", lambda s, b: s + b),
    ("b + s", lambda s, b: b + s),
    ("s - b", lambda s, b: s - b),
    ("b - s", lambda s, b: b - s),
    ("add(s, b, alpha)", lambda s, b: torch.add(s, b, alpha=-0.5)),
    ("add(b, s, alpha)", lambda s, b: torch.add(b.expand_as(s), s, alpha=-0.5)),
    ("sub(s, b, alpha)", lambda s, b: torch.sub(s, b, alpha=2)),
    ("sub(b, s, alpha)", lambda s, b: torch.sub(b.expand_as(s), s, alpha=2)),
    ("rsub(s, b)", lambda s, b: torch.rsub(s, b)),
    ("rsub(b, s)", lambda s, b: torch.rsub(b.expand_as(s), s)),
    ("rsub(s, b, alpha)", lambda s, b: torch.rsub(s, b, alpha=3)),
    ("rsub(b, s, alpha)", lambda s, b: torch.rsub(b.expand_as(s), s, alpha=3)),
    ("rsub(b, s, alpha of zero)", lambda s, b: torch.rsub(b.expand_as(s), s, alpha=0)),
    ("add(b, s, alpha of zero)", lambda s, b: torch.add(b.expand_as(s), s, alpha=0)),
    ("2 - (s + b)", lambda s, b: 2.0 - (s + b)),
    ("2 (b - s) - b", lambda s, b: 2.0 * (b - s) - b),
    ("b - masked", lambda s, b: b - _masked(s)),
    ("masked - b", lambda s, b: _masked(s) - b),
    ("addcmul", lambda s, b: torch.addcmul(b.expand_as(s), s, torch.tensor(-2.0, dtype=s.dtype), value=0.5)),
    ("addcmul of zero", lambda s, b: torch.addcmul(b.expand_as(s), s, torch.zeros((), dtype=s.dtype))),
    ("addcdiv", lambda s, b: torch.addcdiv(b.expand_as(s), s, torch.full((), 2.0, dtype=s.dtype))),
    ("lerp", lambda s, b: torch.lerp(s, b.expand_as(s), 0.25)),
)


def _raw(name, change, inputs) -> None:
    def program(q, k, v, *rest):
        return change(q @ k.transpose(-2, -1), *rest).softmax(-1) @ v

    suite.equal(inputs, name=name, why=f"softmax of {name}")(program)


for _name, _change in NUMBERS:
    _raw(_name, _change, square)
for _shape in ((6, 6), (3, 1, 6), (2, 1, 6, 1)):
    for _name, _change in TENSORS:
        _raw(f"{_name} of {_shape}", _change, plus(_shape))


@suite.equal(plus((6, 6)))
def product_subtracted(q, k, v, b):
    """baddbmm with a negative alpha."""
    flat = torch.baddbmm(b.expand(6, 6, 6), q.flatten(0, 1), k.flatten(0, 1).mT, beta=2.0, alpha=-0.5)
    return flat.view(2, 3, 6, 6).softmax(-1) @ v


@suite.equal(plus((6, 6)))
def product_left_out(q, k, v, b):
    """baddbmm with an alpha of 0: the scores are the bias."""
    flat = torch.baddbmm(b.expand(6, 6, 6), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.0)
    return flat.view(2, 3, 6, 6).softmax(-1) @ v


def _full_row(r):
    """q, k, v, and what is seen: nothing in the last row."""
    return [*r.qkv(), r.bools(2, 1, 6, 6, full="one")]


def _numbers(keep, number, like):
    return torch.zeros(keep.shape, dtype=like.dtype).masked_fill(~keep, number)


@suite.equal(_full_row)
def two_numbers_in_one_row(q, k, v, keep):
    """The lowest number on hidden keys and -1e9 on all: in a row without a key the weights are not all alike."""
    s = q @ k.mT + _numbers(keep, torch.finfo(q.dtype).min, q) + torch.full((6, 1), -1e9, dtype=q.dtype)
    return s.softmax(-1) @ v


@suite.equal(_full_row)
def two_masks_of_one_number(q, k, v, keep):
    """-1e9 by each of two masks: keys that both hide have twice that, in a row without a key too."""
    s = q @ k.mT + _numbers(keep, -1e9, q) + _numbers(keep.flip(-1), -1e9, q)
    return s.softmax(-1) @ v


@suite.equal(_full_row, dtype=torch.float64)
def billion_in_double_softmax_in_single(q, k, v, keep):
    """-1e9 leaves scores in float64, and drowns them when the sum is cast to float32."""
    return (q @ k.mT + _numbers(keep, -1e9, q)).softmax(-1, dtype=torch.float32).to(v.dtype) @ v


@suite.equal(_full_row, dtype=torch.float16)
def ten_thousand_in_half(q, k, v, keep):
    """-1e4 in float16 rounds what it is added to: a row without a key keeps a part of its scores."""
    return (q @ k.mT + _numbers(keep, -1e4, q)).softmax(-1) @ v


@suite.equal(_full_row, dtype=torch.bfloat16)
def thousand_in_bfloat16(q, k, v, keep):
    """-1e3 in bfloat16, where the next number is eight away."""
    return (q @ k.mT + _numbers(keep, -1e3, q)).softmax(-1) @ v


@suite.equal(_full_row, dtype=torch.bfloat16, modes=("inference",))
def one_number_added_and_filled(q, k, v, keep):
    """-1e9 added by one mask and filled in by another: in a row without a key all such keys count alike."""
    other = torch.ones(6, 6).triu().bool()
    s = q @ k.mT + _numbers(keep, -1e9, q)
    return s.masked_fill(~other, -1e9).softmax(-1) @ v


suite.programs += in_dtype([p for p in suite if p.name.endswith("added_and_filled")], torch.float32)


@suite.equal(lambda r: [*r.qkv(), r.randn(3)])
def capped_before_the_sink(q, k, v, sink):
    """The sink's logit is not capped, the scores are."""
    s = torch.tanh(q @ k.mT / 3.0) * 3.0
    return torch.cat([s, sink.view(1, 3, 1, 1).expand(2, 3, 6, 1)], -1).softmax(-1)[..., :-1] @ v
