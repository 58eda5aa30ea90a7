"""Scales, caps, casts and rounding of the scores."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, in_dtype, square

suite = Suite("scales")


def _scalar(positive: bool = True):
    def draw(r: Inputs) -> list[torch.Tensor]:
        scale = torch.rand((), generator=r.generator) + 0.2
        return [*r.qkv(), r.leaf(scale if positive else -scale)]

    return draw


def _tensor(*shape: int, grad: bool = True):
    return lambda r: [*r.qkv(), r.randn(*shape, grad=grad)]


def _raw(kind: str, name: str, why: str, change, inputs=square, **more) -> None:
    def program(q, k, v, *rest):
        return change(q @ k.transpose(-2, -1), *rest).softmax(-1) @ v

    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


_raw("equal", "0-d that needs grad", "a temperature that is learned", lambda s, t: s * t, _scalar())
_raw("equal", "divided by 0-d", "a temperature that is learned, divided by", lambda s, t: s / t, _scalar())
_raw("equal", "0-d negative", "a negative temperature", lambda s, t: s * t, _scalar(False))
_raw("equal", "exp of 0-d", "a logit scale, as in CLIP and Swin v2", lambda s, t: s * t.clamp(max=4.6).exp(), _scalar())
_raw("equal", "1-element", "a temperature of shape (1,)", lambda s, t: s * t, _tensor(1))
_SHAPES = (
    (3, 1, 1), (1, 3, 1, 1), (2, 1, 1, 1), (6, 1), (1, 6), (6,), (6, 6), (2, 3, 1, 1), (2, 3, 6, 1), (2, 3, 1, 6),
)  # fmt: skip
for _shape in _SHAPES:
    _raw("equal", f"tensor {_shape}", f"a scale of shape {_shape}", lambda s, t: s * t, _tensor(*_shape))
_raw("equal", "tensor without grad", "a scale per head that needs no gradient", lambda s, t: s * t,
     _tensor(3, 1, 1, grad=False))  # fmt: skip
_raw("equal", "made in the graph", "torch.tensor(8.0) in the program", lambda s: s / torch.tensor(8.0))
_raw("equal", "root of a tensor", "sqrt of torch.tensor", lambda s: s / torch.sqrt(torch.tensor(8.0, dtype=s.dtype)))
_raw("equal", "full", "torch.full([], 8 ** 0.5)", lambda s: s / torch.full([], 8**0.5, dtype=s.dtype))
_raw("equal", "int division", "// rounds scores down", lambda s: s // 2, modes=("inference",))
_raw("equal", "remainder", "scores modulo 3", lambda s: s % 3)
_raw("equal", "rounded", "scores rounded to integers", lambda s: s.round())
_raw("equal", "rounded to tenths", "scores rounded to tenths", lambda s: s.round(decimals=1))
_raw("equal", "truncated", "scores truncated", lambda s: s.trunc())
_raw("equal", "fake quantised", "eight-bit scores",
     lambda s: torch.fake_quantize_per_tensor_affine(s, 0.1, 0, -128, 127), modes=("inference",))  # fmt: skip
_raw("equal", "straight-through rounding", "rounded forward, not backward", lambda s: s + (s.round() - s).detach())
_raw("equal", "to int and back", "scores as integers", lambda s: s.int().to(s.dtype) + 0 * s)
_raw("equal", "clamped", "scores in [-1, 1]", lambda s: s.clamp(-1, 1))
_raw("equal", "clamped from above", "scores of at most one", lambda s: s.clamp(max=1.0))
_raw("equal", "clamped widely", "scores in ±1e4: nothing here is clamped, something may be",
     lambda s: s.clamp(-1e4, 1e4))  # fmt: skip
_raw("equal", "softcap", "tanh(s / 5) 5", lambda s: torch.tanh(s / 5.0) * 5.0)
_raw("equal", "softcap of other constants", "tanh(s / 5) 3", lambda s: torch.tanh(s / 5.0) * 3.0)
_raw("equal", "softcap without rescaling", "tanh(s / 5)", lambda s: torch.tanh(s / 5.0))
_raw("equal", "softcap without division", "5 tanh(s)", lambda s: 5.0 * torch.tanh(s))
_raw("equal", "softcap inverted", "tanh(5 s) / 5", lambda s: torch.tanh(s * 5.0) / 5.0)
_raw("equal", "softcap after scale", "tanh(s 0.35 / 5) 5", lambda s: torch.tanh(s * 0.35 / 5.0) * 5.0)
_raw("equal", "softcap before scale", "tanh(s / 5) 5 0.35", lambda s: torch.tanh(s / 5.0) * 5.0 * 0.35)
_raw("equal", "softcap twice", "capped twice", lambda s: torch.tanh(torch.tanh(s / 5.0) * 5.0 / 4.0) * 4.0)
_raw("equal", "softcap by atan", "another function", lambda s: torch.atan(s / 5.0) * 5.0)
_raw("equal", "softcap by sigmoid", "another function", lambda s: torch.sigmoid(s / 5.0) * 5.0)
_raw("equal", "softcap by a tensor", "a learned cap", lambda s, t: torch.tanh(s / t) * t, _scalar())
_raw("equal", "softcap then mask", "capped, then causal",
     lambda s: (torch.tanh(s / 5.0) * 5.0).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf))  # fmt: skip
_raw("equal", "mask then softcap", "causal by a bias of -10, then capped: the future is seen a little",
     lambda s: torch.tanh((s + torch.full((6, 6), -10.0, dtype=s.dtype).triu(1)) / 5.0) * 5.0)  # fmt: skip
_raw("equal", "softcap and bias inside", "the bias is capped too", lambda s, b: torch.tanh((s + b) / 5.0) * 5.0,
     _tensor(6, 6))  # fmt: skip
_raw("equal", "to half and back", "scores rounded to float16", lambda s: (s * 0.35).half().to(s.dtype),
     through=torch.float16)  # fmt: skip
_raw("equal", "to bfloat16 and back", "scores rounded to bfloat16", lambda s: (s * 0.35).bfloat16().to(s.dtype),
     through=torch.bfloat16)  # fmt: skip
_raw("equal", "overflow in half", "scores of 1e5 are infinite in float16: rows are NaN",
     lambda s: (s * 1e5).half().to(s.dtype))  # fmt: skip


@suite.equal(through=torch.float16)
def softmax_in_half(q, k, v):
    """The softmax in float16, the rest not."""
    return (q @ k.mT * 8**-0.5).half().softmax(-1).to(v.dtype) @ v


@suite.equal(through=torch.bfloat16)
def softmax_in_bfloat16(q, k, v):
    """The softmax in bfloat16, the rest not."""
    return (q @ k.mT * 8**-0.5).softmax(-1, dtype=torch.bfloat16).to(v.dtype) @ v


@suite.equal()
def softmax_in_double(q, k, v):
    """The softmax in float64."""
    return (q @ k.mT * 8**-0.5).softmax(-1, dtype=torch.float64).to(v.dtype) @ v


@suite.equal()
def everything_in_double(q, k, v):
    """float64 from scores to output."""
    return ((q.double() @ k.double().mT) * 8**-0.5).softmax(-1) @ v.double()


@suite.equal(through=torch.bfloat16)
def products_in_bfloat16(q, k, v):
    """q and k rounded to bfloat16 for the scores alone."""
    s = (q.bfloat16() @ k.bfloat16().mT).to(q.dtype)
    return (s * 8**-0.5).softmax(-1) @ v


@suite.equal(through=torch.bfloat16)
def value_rounded(q, k, v):
    """v and p rounded to bfloat16 for the second product."""
    p = (q @ k.mT * 8**-0.5).softmax(-1)
    return (p.bfloat16() @ v.bfloat16()).to(q.dtype)


@suite.equal(lambda r: [r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8), r.randn(2, 3, 6, 8, grad=False).double()])
def value_in_double(q, k, v):
    """v comes in float64."""
    return (q @ k.mT * 8**-0.5).softmax(-1).double() @ v


@suite.equal()
def scale_on_both_sides(q, k, v):
    """q and k scaled by the fourth root, the scores once more."""
    return ((q * 8**-0.25) @ (k * 8**-0.25).mT * 2.0).softmax(-1) @ v


@suite.equal(_tensor(8))
def scale_per_feature(q, k, v, w):
    """A weight per feature between q and k."""
    return ((q * w) @ k.mT).softmax(-1) @ v


@suite.equal(_tensor(6, 1))
def scale_per_query_on_q(q, k, v, w):
    """A learned scale per query, as in log-length scaling."""
    return ((q * w) @ k.mT).softmax(-1) @ v


@suite.equal(_tensor(6, 1))
def scale_per_key_on_k(q, k, v, w):
    """A learned scale per key."""
    return (q @ (k * w).mT).softmax(-1) @ v


@suite.equal(allow=5e-3)
def huge_scores(q, k, v):
    """Scores of 1e3: exp overflows without the maximum, and the kernel must subtract it as softmax does."""
    return (q @ k.mT * 300.0).softmax(-1) @ v


@suite.equal()
def infinite_scores(q, k, v):
    """A key of infinities: NaN where eager has NaN."""
    k = torch.cat([k[..., :1, :] * math.inf, k[..., 1:, :]], -2)
    return (q @ k.mT).softmax(-1) @ v


@suite.equal()
def nan_in_value(q, k, v):
    """A NaN in a masked value: 0 times NaN is NaN in eager, and a kernel may skip the key."""
    v = torch.cat([v[..., :5, :], v[..., 5:, :] * math.nan], -2)
    return (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1) @ v


@suite.equal()
def infinity_in_masked_key(q, k, v):
    """An infinity in a masked key: the score is filled, and never infinite."""
    k = torch.cat([k[..., :5, :], k[..., 5:, :].abs() * math.inf], -2)
    return (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1) @ v


@suite.equal()
def nan_in_masked_key(q, k, v):
    """A NaN in a masked key: masked_fill hides it, an added mask would not."""
    k = torch.cat([k[..., :5, :], k[..., 5:, :] * math.nan], -2)
    return (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1) @ v


@suite.equal()
def nan_in_a_query(q, k, v):
    """A NaN in a query that meets few keys: flash attention for CPUs leaves it out where it has no mask."""
    q = torch.cat([q[..., :1, :] * math.nan, q[..., 1:, :]], -2)
    return ((q @ k.mT) * 0.4).softmax(-1) @ v


@suite.equal()
def negative_scale_and_causal(q, k, v):
    """A negative scale under a causal mask: a kernel that scales its own -inf gets +inf."""
    s = (q @ k.mT) * -0.4
    return s.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1) @ v


@suite.equal()
def negative_scale_on_q_and_causal(q, k, v):
    """The same, with the scale on q."""
    return ((q * -0.4) @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1) @ v


_NAMES = ("softmax_in_double", "scale_on_both_sides", "softcap", "tensor (3, 1, 1)", "value_rounded")
suite.programs += in_dtype([p for p in suite if p.name.split("/")[1] in _NAMES], torch.bfloat16)
