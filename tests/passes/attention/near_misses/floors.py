"""Scores that are not let below a number: `maximum(scores, finfo.min)` and what only looks like it; padded columns."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend, square
from torch.nn import functional as F

suite = Suite("floors")


def _low(s: torch.Tensor) -> float:
    return torch.finfo(s.dtype).min


def _masked(full: str):
    """q, k, v and a mask of (2, 6, 6), some of whose rows (or all) have no key."""

    def draw(r: Inputs) -> list:
        return [*r.qkv(), r.bools(2, 6, 6, full=full)]

    return draw


WAYS = {
    "max": lambda s: torch.max(s, torch.tensor(_low(s), dtype=s.dtype)),
    "maximum": lambda s: torch.maximum(torch.full((), _low(s)), s),
    "clamp": lambda s: s.clamp(min=_low(s)),
    "clamp_min": lambda s: torch.clamp_min(s, _low(s)),
    "after a cast": lambda s: torch.max(s.float(), torch.tensor(torch.finfo(torch.float32).min)),
    "of float32": lambda s: torch.max(s, torch.tensor(torch.finfo(torch.float32).min)),
}
FILLS = {"finfo.min": _low, "-inf": lambda s: -math.inf, "-1e9": lambda s: -1e9}


def _added(name: str, way, number, *, twice: bool, full: str, dtype: torch.dtype) -> None:
    """One mask added, or two of which the sum may be minus infinity, and then the floor."""

    def program(q, k, v, keep):
        n = number(q)
        bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, n)
        if twice:
            bias = bias + torch.full((6, 6), n, dtype=q.dtype).triu(1)
        return way(q @ k.mT * 8**-0.5 + bias[:, None]).softmax(-1).to(v.dtype) @ v

    suite.equal(_masked(full), name=name, why="a mask is added, then a floor", dtype=dtype)(program)


for _index, (_way, _make) in enumerate(WAYS.items()):
    for _fill, _number in FILLS.items():
        for _full in ("one", "all"):
            _twice = (_index + len(_fill) + len(_full)) % 2 == 0
            _dtype = torch.bfloat16 if _way == "after a cast" else torch.float32
            _name = f"{_way}, {_fill}{' twice' if _twice else ''}, rows without a key: {_full}"
            _added(_name, _make, _number, twice=_twice, full=_full, dtype=_dtype)

for _full in ("one", "all"):  # the sum of two is minus infinity in bfloat16, whose lowest number lies above float32's
    _added(
        f"two in bfloat16, the floor in float32, rows without a key: {_full}", WAYS["after a cast"], _low, twice=True,
        full=_full, dtype=torch.bfloat16,
    )  # fmt: skip


@suite.equal(_masked("one"))
def minus_infinity_filled_then_floor(q, k, v, keep):
    """A row of minus infinities becomes uniform instead of NaN."""
    return attend(q, k, v, lambda s: WAYS["max"](s.masked_fill(~keep[:, None], -math.inf)))


@suite.equal(_masked("one"))
def floor_then_fill(q, k, v, keep):
    """The floor comes first: a row of minus infinities is NaN."""
    return attend(q, k, v, lambda s: WAYS["max"](s).masked_fill(~keep[:, None], -math.inf))


@suite.decline(_masked("one"))
def floor_then_scale(q, k, v, keep):
    """The floor is scaled: masked scores become -1e38."""
    return attend(q, k, v, lambda s: WAYS["max"](s.masked_fill(~keep[:, None], -math.inf)) * 0.3)


@suite.decline(_masked("one"))
def floor_then_bias(q, k, v, keep):
    """A mask is added to what was brought up to the floor."""
    bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, _low(q))[:, None]
    return attend(q, k, v, lambda s: WAYS["max"](s + bias) + bias)


@suite.decline()
def two_floors(q, k, v):
    """Twice, with another gradient where they meet."""
    return attend(q, k, v, lambda s: WAYS["max"](s).clamp(min=_low(s)))


@suite.equal(_masked("one"))
def floor_then_shift(q, k, v, keep):
    """Rows are shifted by their maximum after the floor."""
    bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, _low(q))[:, None]
    return attend(q, k, v, lambda s: (f := WAYS["max"](s + bias)) - f.amax(-1, keepdim=True))


@suite.equal(lambda r: [*r.qkv(), r.randn(6, 6, grad=False)])
def unknown_bias(q, k, v, bias):
    """What is added is not known."""
    return attend(q, k, v, lambda s: (s + bias).clamp(min=_low(s)))


@suite.equal(lambda r: [*r.qkv(), r.randn(6, 6, grad=False)])
def unknown_bias_of_huge_numbers(q, k, v, bias):
    """What is added is not known, and reaches minus infinity."""
    large = torch.where(bias > 0, bias, bias * -_low(bias) * 2)
    return attend(q, k, v, lambda s: (s + large).clamp(min=_low(s)))


@suite.decline()
def clamped_on_both_sides(q, k, v):
    """From above too, where scores may be infinite."""
    return attend(q, k, v, lambda s: s.clamp(min=_low(s), max=-_low(s)))


@suite.decline()
def maximum_with_zero(q, k, v):
    """A relu."""
    return attend(q, k, v, lambda s: torch.maximum(s, torch.tensor(0.0)))


@suite.decline()
def maximum_with_minus_ten_thousand(q, k, v):
    """A score can be as low."""
    return attend(q * 1e3, k, v, lambda s: torch.maximum(s, torch.tensor(-1e4)))


@suite.decline(lambda r: [*r.qkv(), r.randn(6, 6)])
def maximum_with_a_tensor(q, k, v, other):
    """Whichever is larger."""
    return attend(q, k, v, lambda s: torch.maximum(s, other))


@suite.decline(square)
def padded_on_the_other_side(q, k, v):
    """The column is put in front, and the last key is dropped."""
    return F.pad(q @ k.mT, (1, 0)).softmax(-1)[..., :-1] @ v


@suite.decline(square)
def padded_by_two(q, k, v):
    """Two columns are appended and dropped."""
    return F.pad(q @ k.mT, (0, 2)).softmax(-1)[..., :-2] @ v


@suite.decline(square)
def padded_rows_too(q, k, v):
    """A row is appended as well."""
    return F.pad(q @ k.mT, (0, 1, 0, 1)).softmax(-1)[..., :-1, :-1] @ v


@suite.equal(_masked("one"))
def padded_where_rows_have_no_key(q, k, v, keep):
    """The column is a key of every row."""
    return F.pad((q @ k.mT).masked_fill(~keep[:, None], -math.inf), (0, 1)).softmax(-1)[..., :-1] @ v


@suite.equal(square)
def padded_after_a_cap(q, k, v):
    """The column is not capped."""
    return F.pad((q @ k.mT).tanh(), (0, 1)).softmax(-1)[..., :-1] @ v
