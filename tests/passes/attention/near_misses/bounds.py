"""Scores between two numbers: a clamp of what the maximum of its row was taken off changes no weight, any other may."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, square

suite = Suite("bounds")
WIDE = (-5e4, 5e4)


def _masked(r: Inputs) -> list:
    return [*r.qkv(), r.bools(2, 1, 6, 6, full="none")]


def _spread(r: Inputs) -> list:
    """Scores so far apart that bounds are reached."""
    q, k, v = r.qkv()
    return [q * 3e3, k * 3e3, v]


def _off_the_top(s: torch.Tensor) -> torch.Tensor:
    return s - s.amax(-1, keepdim=True)


BEHIND = {
    "both": lambda s: s.clamp(*WIDE), "one after the other": lambda s: s.clamp(min=WIDE[0]).clamp(max=WIDE[1]),
    "at the largest": lambda s: s.clamp(max=0), "clamp_min": lambda s: s.clamp_min(-1e4),
    "clamp_max": lambda s: s.clamp_max(1.0), "scaled before": lambda s: (s * 4).clamp(*WIDE),
    "in float32": lambda s: s.float().clamp(*WIDE),
}  # fmt: skip
for _name, _way in BEHIND.items():
    for _draw in (square, _spread):

        def _program(q, k, v, way=_way):
            return way(_off_the_top(q @ k.mT)).softmax(-1).to(v.dtype) @ v

        _how = "apart" if _draw is _spread else "near"
        suite.equal(_draw, name=f"{_name}, scores {_how}", why="what is clamped has no weight")(_program)


@suite.equal(_spread, dtype=torch.bfloat16)
def off_the_top_and_clamped_in_bfloat16(q, k, v):
    """Few of the scores are within the bounds."""
    return _off_the_top(q @ k.mT).clamp(*WIDE).softmax(-1) @ v


@suite.equal(_spread)
def quotient_of_clamped(q, k, v):
    """The softmax by hand that clamps are written for."""
    e = _off_the_top(q @ k.mT).clamp(*WIDE).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@suite.decline(_spread)
def off_the_largest_of_all(q, k, v):
    """A row may have no score within the bounds: it gets equal weights."""
    s = q @ k.mT
    return (s - s.max()).clamp(*WIDE).softmax(-1) @ v


@suite.decline(_spread)
def off_the_largest_of_a_head(q, k, v):
    """The same."""
    s = q @ k.mT
    return (s - s.amax((-1, -2), keepdim=True)).clamp(*WIDE).softmax(-1) @ v


@suite.decline
def never_off_the_top(q, k, v):
    """Nothing says that scores are at most 5."""
    return (q @ k.mT).clamp(*WIDE).softmax(-1) @ v


@suite.decline
def bound_that_is_near(q, k, v):
    """What lies five below the largest has a weight."""
    return _off_the_top(q @ k.mT).clamp(-0.5, 5.0).softmax(-1) @ v


@suite.decline
def bound_below_the_largest(q, k, v):
    """The largest are made equal."""
    return _off_the_top(q @ k.mT).clamp(max=-0.25).softmax(-1) @ v


@suite.decline
def shifted_up_to_the_bound(q, k, v):
    """The largest is above 0 again."""
    return (_off_the_top(q @ k.mT) + 5).clamp(max=4.5).softmax(-1) @ v


@suite.decline
def off_the_top_of_other_rows(q, k, v):
    """The maximum is of the queries, not of the keys."""
    s = q @ k.mT
    return (s - s.amax(-2, keepdim=True)).clamp(-5e4, 0.0).softmax(-1) @ v


@suite.decline(_spread)
def scaled_behind_it(q, k, v):
    """What had no weight gets one."""
    return (_off_the_top(q @ k.mT).clamp(*WIDE) * 1e-5).softmax(-1) @ v


@suite.decline(lambda r: [*_spread(r), r.bools(2, 1, 6, 6, full="none")])
def masked_behind_it(q, k, v, keep):
    """Where the largest is hidden, what was clamped is all that is left."""
    return _off_the_top(q @ k.mT).clamp(*WIDE).masked_fill(~keep, -math.inf).softmax(-1) @ v


@suite.decline(lambda r: [*_spread(r), r.randn(2, 1, 6, 6, scale=1e5)])
def biased_behind_it(q, k, v, bias):
    """The bias decides among what was clamped."""
    return (_off_the_top(q @ k.mT).clamp(*WIDE) + bias).softmax(-1) @ v


@suite.decline(_spread)
def a_part_of_the_keys(q, k, v):
    """The largest is not among them."""
    return _off_the_top(q @ k.mT).clamp(*WIDE)[..., 1:].softmax(-1) @ v[..., 1:, :]


@suite.decline(lambda r: [*_spread(r), r.bools(2, 1, 6, 6, full="none")])
def exponentials_masked_behind_it(q, k, v, keep):
    """As masked behind it."""
    e = _off_the_top(q @ k.mT).clamp(*WIDE).exp() * keep
    return (e / e.sum(-1, keepdim=True)) @ v


@suite.decline(lambda r: [*r.qkv(), r.bools(2, 1, 6, 6, full="one")])
def masked_with_minus_infinity_before(q, k, v, keep):
    """A row without a key is NaN, and the clamp lets none of its gradient through."""
    return _off_the_top((q @ k.mT).masked_fill(~keep, -math.inf)).clamp(*WIDE).softmax(-1) @ v


@suite.decline(_masked)
def capped_behind_it(q, k, v, keep):
    """tanh brings what was clamped near the largest again."""
    s = _off_the_top(q @ k.mT).clamp(*WIDE)
    return (torch.tanh(s / 30) * 30).masked_fill(~keep, -math.inf).softmax(-1) @ v
