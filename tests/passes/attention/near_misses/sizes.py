"""Sizes at the edge, strides, dtypes and devices that few programs have, and sizes that change between calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attention_near_misses.program import INFERENCE, Inputs, Suite, attend, in_dtype
from torch import nn
from torch.nn import functional as F

suite = Suite("sizes")


def causal(q, k, v):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return attend(q, k, v, lambda s: s.masked_fill(hidden, -math.inf))


def causal_lowest(q, k, v):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return attend(q, k, v, lambda s: s.masked_fill(hidden, torch.finfo(s.dtype).min))


EDGES = {
    "no query": ((2, 3, 0, 8), (2, 3, 6, 8)),
    "no key": ((2, 3, 6, 8), (2, 3, 0, 8)),
    "no batch": ((0, 3, 6, 8), (0, 3, 6, 8)),
    "no head": ((2, 0, 6, 8), (2, 0, 6, 8)),
    "no feature": ((2, 3, 6, 0), (2, 3, 6, 0)),
    "one query": ((2, 3, 1, 8), (2, 3, 6, 8)),
    "one key": ((2, 3, 6, 8), (2, 3, 1, 8)),
    "one of both": ((2, 3, 1, 8), (2, 3, 1, 8)),
    "one feature": ((2, 3, 6, 1), (2, 3, 6, 1)),
    "three features": ((2, 3, 6, 3), (2, 3, 6, 3)),
    "one of all": ((1, 1, 1, 1), (1, 1, 1, 1)),
    "long": ((1, 1, 70, 8), (1, 1, 70, 8)),
    "long queries": ((1, 1, 70, 8), (1, 1, 3, 8)),
    "long keys": ((1, 1, 3, 8), (1, 1, 70, 8)),
}


def _of(q: tuple[int, ...], k: tuple[int, ...]):
    return lambda r: [r.randn(*q), r.randn(*k), r.randn(*k)]


def plain(q, k, v):
    return (q @ k.mT * 0.3).softmax(-1) @ v


for _name, (_q, _k) in EDGES.items():
    if _name != "no feature":
        suite.equal(_of(_q, _k), name=f"{_name}, causal", why=f"{_name}, causal from the first key")(causal)
    _add = suite.decline if _k[-2] == 1 else suite.equal  # a softmax of a single score is no attention
    _add(_of(_q, _k), name=_name, why=_name)(plain)

for _order in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3)):

    def _strided(r: Inputs, order=_order):
        shape = [(2, 3, 6, 8)[i] for i in order]
        back = [order.index(i) for i in range(4)]
        return [r.randn(*shape).permute(back) for _ in range(3)]

    suite.equal(_strided, name=f"strides {_order}", why=f"inputs laid out as {_order}")(plain)


@suite.equal(lambda r: [r.randn(2, 3, 12, 16)[:, :, ::2, ::2] for _ in range(3)])
def strided_slices(q, k, v):
    """Every second position and feature: the last stride is two."""
    return attend(q, k, v)


def _expanded(r: Inputs) -> list[torch.Tensor]:
    full = (2, 3, 6, 8)
    return [r.randn(*full), r.randn(1, 1, 1, 8).expand(full), r.randn(1, 1, 6, 1).expand(full)]


@suite.equal(_expanded)
def zero_strides(q, k, v):
    """k and v are expanded: most strides are zero."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(6, 8).expand(2, 3, 6, 8), *r.qkv()[1:]], modes=(INFERENCE,))
def zero_strides_of_query(q, k, v):
    """q is expanded."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(200)[3:].as_strided((2, 3, 6, 8), (3, 2, 1, 4)) for _ in range(3)], modes=(INFERENCE,))
def overlapping_strides(q, k, v):
    """Windows that overlap in memory."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.randn(2, 3, 8, 6).mT for _ in range(3)])
def features_not_last_in_memory(q, k, v):
    """The features' stride is six."""
    return attend(q, k, v)


@suite.equal(lambda r: [r.ints(-3, 4, 2, 3, 6, 8) for _ in range(2)] + [r.randn(2, 3, 6, 8)])
def integer_scores(q, k, v):
    """q and k are integers; their product is made floating."""
    return (q @ k.mT).to(v.dtype).mul(0.3).softmax(-1) @ v


@suite.equal(lambda r: [r.ints(0, 2, 2, 3, 6, 8).bool() for _ in range(2)] + [r.randn(2, 3, 6, 8)])
def boolean_scores(q, k, v):
    """q and k are bools, made floating."""
    return (q.to(v.dtype) @ k.to(v.dtype).mT).softmax(-1) @ v


@suite.equal(lambda r: [*r.qkv()[:2], r.ints(-3, 4, 2, 3, 6, 8)])
def integer_value(q, k, v):
    """v holds integers."""
    return attend(q, k, v.to(q.dtype))


def _complex(r: Inputs) -> list[torch.Tensor]:
    return [torch.complex(*(r.randn(2, 3, 6, 8, grad=False) for _ in range(2))) for _ in range(3)]


@suite.equal(_complex, modes=(INFERENCE,))
def complex_values(q, k, v):
    """Complex tensors: the softmax is of the scores' real part, v stays complex."""
    p = (q @ k.mH).real.softmax(-1)
    return p.to(v.dtype) @ v


@suite.equal(lambda r: [x.to("meta") for x in r.qkv()], modes=(INFERENCE,))
def meta_tensors(q, k, v):
    """Tensors without data."""
    return attend(q, k, v)


def _length(n: int, m: int | None = None):
    return lambda r: r.qkv(2, 3, n, 8, keys=m)


suite.equal(_length(6), then=(_length(9), _length(4), _length(1)), dynamic=True, name="dynamic length",
            why="the length changes between calls")(plain)  # fmt: skip
suite.equal(_length(6), then=(_length(9), _length(4), _length(1)), dynamic=True, name="dynamic length, causal",
            why="the length changes between calls")(causal)  # fmt: skip
suite.equal(_length(6, 9), then=(_length(9, 6), _length(4, 4)), dynamic=True, name="dynamic lengths, causal",
            why="both lengths change: causal from the first key")(causal)  # fmt: skip
suite.equal(_length(6), then=(_length(6, 9), _length(9, 6)), name="static, then oblong, causal",
            why="the first call is square, the others are not")(causal)  # fmt: skip
suite.equal(_length(6), then=(_length(6, 9), _length(2, 6)), name="static, then oblong, causal with finfo.min",
            why="the first call is square, the others are not")(causal_lowest)  # fmt: skip


def _decoded(r: Inputs, n: int, m: int) -> list[torch.Tensor]:
    return r.qkv(2, 3, n, 8, keys=m)


@suite.equal(_length(6), then=(_length(1, 7), _length(1, 8), _length(2, 10)), dynamic=True)
def decode_steps(q, k, v):
    """Prefill, then steps: causal from the last key."""
    n, m = q.shape[-2], k.shape[-2]
    seen = torch.arange(m) <= torch.arange(m - n, m)[:, None]
    return attend(q, k, v, lambda s: s.masked_fill(~seen, -math.inf))


@suite.equal(_length(6), then=(_length(1, 7), _length(2, 10)), dynamic=True)
def decode_steps_upper_left(q, k, v):
    """Prefill, then steps, causal from the first key: a mistake that must stay."""
    n, m = q.shape[-2], k.shape[-2]
    seen = torch.arange(m) <= torch.arange(n)[:, None]
    return attend(q, k, v, lambda s: s.masked_fill(~seen, -math.inf))


@suite.equal(_length(6), then=(_length(9), _length(12)), dynamic=True)
def scale_by_length(q, k, v):
    """The scale is log of the length."""
    return (q @ k.mT * math.log(k.shape[-2] + 1) * 0.2).softmax(-1) @ v


@suite.equal(_length(6), then=(_length(9), _length(12)), dynamic=True)
def window_by_length(q, k, v):
    """The window is half the length."""
    n = q.shape[-2]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return attend(q, k, v, lambda s: s.masked_fill((i - j).abs() > n // 2, -math.inf))


@suite.equal(_length(6), then=(_length(9), _length(6)))
def in_a_branch_by_size(q, k, v):
    """Two programs, chosen by size: softmax over the queries when short."""
    return (q @ k.mT).softmax(-2 if q.shape[-2] < 8 else -1) @ v


@suite.equal(through=torch.bfloat16)
class AutocastToBfloat16(nn.Module):
    """Autocast inside: the products in bfloat16, the softmax in float32."""

    def forward(self, q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
        return out.to(q.dtype)


@suite.equal(through=torch.bfloat16)
def autocast_for_scores_only(q, k, v):
    """Autocast around the scores alone."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = q @ k.mT
    return (s.to(q.dtype) * 8**-0.5).softmax(-1) @ v


@suite.equal(through=torch.bfloat16)
def autocast_off_inside(q, k, v):
    """Autocast around all, off for the scores."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            s = q.float() @ k.float().mT * 8**-0.5
        return (s.softmax(-1) @ v.float()).to(q.dtype)


@suite.equal(_length(6))
def default_dtype_of_new_tensors(q, k, v):
    """A mask of the default dtype on scores of another: the sum is promoted."""
    return (q @ k.mT + torch.zeros(6, 6).triu(1).to(torch.float64)).softmax(-1).to(v.dtype) @ v


@suite.equal(lambda r: [F.pad(x, (0, 0, 0, 2)) for x in r.qkv()])
def padded_inputs(q, k, v):
    """Two rows of zeros: they count as keys."""
    return attend(q, k, v)


@suite.equal(
    lambda r: [r.randn(2, 6, 72)], then=(lambda r: [r.randn(2, 9, 72)], lambda r: [r.randn(3, 4, 72)]), dynamic=True
)
def dynamic_and_packed(x):
    """qkv packed; batch, length and width are dynamic, the heads a number."""
    q, k, v = (t.view(x.shape[0], x.shape[1], 3, 8).transpose(1, 2) for t in x.chunk(3, dim=-1))
    return causal_lowest(q, k, v).transpose(1, 2).flatten(2)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8)], then=(lambda r: [r.randn(4, 2, 9, 8)],), dynamic=True)
def dynamic_in_all(x):
    """One input for all, every dim dynamic."""
    return plain(x * 0.5, x, x)


_ROUNDED, _EXACT = ("one key", "long, causal"), ("one feature", "one query, causal")
suite.programs += in_dtype([p for p in suite if p.name.endswith(tuple(f"[{n}]" for n in _ROUNDED))], torch.bfloat16)
suite.programs += in_dtype([p for p in suite if p.name.endswith(tuple(f"[{n}]" for n in _EXACT))], torch.float64)


def _packed(batch: int, length: int) -> Callable[[Inputs], list[Any]]:
    return lambda r: [r.randn(batch, length, 48)]


@suite.decline(_packed(0, 5), name="no batch")
@suite.decline(_packed(2, 0), name="no query")
def nothing(qkv):
    """No element is computed; sizes of 0 tell no layout from another."""
    q, k, v = qkv.view(*qkv.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    return (q @ k.mT * 0.35).softmax(-1) @ v


def _of_length(n: int):
    return lambda r: r.qkv(2, 3, n, 8)


@suite.equal(_of_length(8), dynamic=True, then=(_of_length(20), _of_length(4)))
def windows_of_a_dynamic_length(q, k, v):
    """As many windows of four as the length has."""
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b, h, n // 4, 4, d) for t in (q, k, v))
    return attend(q, k, v).reshape(b, h, n, d)
