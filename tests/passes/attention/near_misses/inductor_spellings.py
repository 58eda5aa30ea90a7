"""Programs in the very spellings that Inductor's own attention matcher knows, with something else in one place.

That matcher takes dims, numbers and masks as they come. All of these are to be right with Inductor behind us too.
"""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import INFERENCE, Inputs, Suite, in_dtype, plus
from torch.nn import functional as F

suite = Suite("inductor_spellings")


def bshd(r: Inputs) -> list[torch.Tensor]:
    """q, k, v of (batch, sequence, heads, features), as they come from projections."""
    return [r.randn(2, 6, 3, 8) for _ in range(3)]


def same_sizes(r: Inputs) -> list[torch.Tensor]:
    """The same, all sizes equal."""
    return [r.randn(4, 4, 4, 4) for _ in range(3)]


def padded(high: int, full: bool = False):
    def draw(r: Inputs) -> list[torch.Tensor]:
        mask = r.ints(0, high, 2, 6)
        mask[:, 0] = 1
        if full:
            mask[1] = 0
        return [*bshd(r), mask]

    return draw


def _heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.permute(0, 2, 1, 3) for t in tensors]


def _add(name: str, why: str, program, inputs=bshd, kind: str = "equal", **more) -> None:
    getattr(suite, kind)(inputs, name=name, why=why, **more)(program)


def divided(dim: int, rank: int = 4):
    def program(q, k, v):
        q, k, v = _heads(q, k, v) if rank == 4 else (q, k, v)
        return torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(8)).softmax(dim=dim).matmul(v)

    return program


def multiplied(dim: int):
    return lambda q, k, v: torch.matmul(q, k.transpose(-2, -1)).mul(0.35).softmax(dim=dim).matmul(v)


for _dim in (-2, 1, 0):
    _add(f"div, over {_dim}", f"div by a number, softmax over {_dim}", divided(_dim), same_sizes, "decline")
    _add(f"mul, over {_dim}", f"mul by a number, softmax over {_dim}", multiplied(_dim), same_sizes, "decline")
_add("div", "as it should be", divided(-1), same_sizes)
_add("div, five axes", "five axes", divided(-1, 5), lambda r: r.qkv(2, 2, 3, 6, 8))
_add("mul, five axes", "five axes", multiplied(-1), lambda r: r.qkv(2, 2, 3, 6, 8))
_add("mul, three axes", "three axes", multiplied(-1), lambda r: r.qkv(4, 6, 8))


def scaled_by(q, k, v, scale):
    return torch.matmul(q, k.transpose(-2, -1)).mul(scale).softmax(dim=-1).matmul(v)


def divided_by(q, k, v, scale):
    q, k, v = _heads(q, k, v)
    return torch.matmul(q, k.transpose(-2, -1)).div(scale).softmax(dim=-1).matmul(v)


for _shape in ((), (1,), (3, 1, 1), (1, 1, 6, 1), (6, 6), (6,)):

    def _scale(r: Inputs, shape: tuple[int, ...] = _shape) -> list[torch.Tensor]:
        return [r.leaf(torch.rand(shape, generator=r.generator) + 0.5)]

    _add(f"mul by {_shape}", f"the scale is a tensor of shape {_shape}", scaled_by,
         lambda r, s=_scale: [*r.qkv(), *s(r)])  # fmt: skip
    _add(f"div by {_shape}", f"the scale is a tensor of shape {_shape}", divided_by,
         lambda r, s=_scale: [*bshd(r), *s(r)])  # fmt: skip


def distilbert(fill: float, test=lambda m: m == 0):
    def program(q, k, v, mask):
        q, k, v = _heads(q, k, v)
        scores = (q @ k.transpose(-2, -1)).div(math.sqrt(8))
        value = torch.full((), fill, dtype=q.dtype)
        hidden = test(mask).view((q.size(0), 1, 1, k.size(-2))).expand_as(scores)
        return torch.softmax(scores.masked_fill(hidden, value), dim=-1) @ v

    return program


_add("padding", "a padding mask of zeros and ones", distilbert(-math.inf), padded(2))
_add("padding of 0 to 3", "m == 0 where m holds 0, 1, 2 and 3", distilbert(-math.inf), padded(4))
_add("padding of 0 to 3, m == 1", "m == 1 where m holds 0, 1, 2 and 3", distilbert(-1e30, lambda m: m == 1), padded(4))
_add("padding, m != 0", "what is to be kept is hidden", distilbert(-1e30, lambda m: m != 0), padded(2))
_add("padding, empty sequence", "a sequence without keys: NaN", distilbert(-math.inf), padded(2, full=True))
_add("padding, empty sequence, finfo.min", "a sequence without keys: the average",
     distilbert(torch.finfo(torch.float32).min), padded(2, full=True))  # fmt: skip
for _fill in (0.0, 1.0, -5.0, 1e9):
    _add(f"padding, fill {_fill:g}", f"hidden scores become {_fill:g}", distilbert(_fill), padded(2))


def gpt2(fill: float | None, keep: torch.Tensor, extra: bool = False):
    def program(q, k, v, bias):
        q, k, v = _heads(q, k, v)
        weights = torch.matmul(q, k.permute(0, 1, 3, 2))
        weights = weights.div(torch.full([], 8**0.5, dtype=weights.dtype))
        value = torch.full((), torch.finfo(q.dtype).min if fill is None else fill, dtype=q.dtype)
        weights = torch.where(keep.to(torch.bool)[:6, :6], weights, value)
        weights = weights + bias if extra else weights
        return F.dropout(weights.softmax(dim=-1).type(v.dtype), 0.0, True).matmul(v), k, v

    return program


def _biased(r: Inputs) -> list[torch.Tensor]:
    return [*bshd(r), r.randn(2, 1, 6, 6)]


_CAUSAL = torch.ones(8, 8).tril()
_EMPTY_ROW = torch.ones(8, 8).tril(-1)
for _extra in (False, True):
    _with = " and bias" if _extra else ""
    _add(f"where{_with}", f"causal by where{_with}", gpt2(None, _CAUSAL, _extra), _biased)
    _add(f"where{_with}, empty row", f"the first row is empty: the average{_with}", gpt2(None, _EMPTY_ROW, _extra),
         _biased)  # fmt: skip
    for _fill in (0.0, -5.0):
        _add(f"where{_with}, fill {_fill:g}", f"hidden scores become {_fill:g}{_with}", gpt2(_fill, _CAUSAL, _extra),
             _biased)  # fmt: skip


def bert(q, k, v, mask):
    q, k, v = _heads(q, k, v)
    return (torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(8)) + mask).softmax(dim=-1).matmul(v)


def bert_over_queries(q, k, v, mask):
    q, k, v = _heads(q, k, v)
    return (torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(8)) + mask).softmax(dim=-2).matmul(v)


def bert_alpha(q, k, v, mask):
    q, k, v = _heads(q, k, v)
    return torch.add(torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(8)), mask, alpha=2).softmax(dim=-1).matmul(v)


def _floats(*shape: int):
    return lambda r: [*bshd(r), r.randn(*shape)]


for _shape in ((2, 1, 1, 6), (2, 3, 6, 6), (6, 6), (1, 6), (6,), (3, 1, 1), (3, 6, 1), (2, 2, 3, 6, 6)):
    _add(f"bias {_shape}", f"a bias of shape {_shape}", bert, _floats(*_shape))
_add("bias of bools", "scores plus True", bert, lambda r: [*bshd(r), r.bools(2, 1, 6, 6)])
_add("bias of ints", "scores plus integers", bert, lambda r: [*bshd(r), r.ints(-3, 3, 2, 1, 6, 6)])
_add("bias of infinities", "a row of -inf: NaN", bert,
     lambda r: [*bshd(r), r.leaf(torch.where(r.bools(2, 1, 6, 6, full="one"), 0.0, -math.inf), False)])  # fmt: skip
_add("bias over queries", "softmax over -2", bert_over_queries, _floats(2, 1, 6, 6), "decline")
_add("bias with alpha", "twice the bias", bert_alpha, _floats(2, 1, 6, 6))


def t5(q, k, v, bias):
    q, k, v = _heads(q, k, v)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    scores += bias
    return scores.float().softmax(dim=-1).type_as(q).matmul(v)


def t5_over_heads(q, k, v, bias):
    q, k, v = _heads(q, k, v)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) + bias
    return scores.float().softmax(dim=1).type_as(q).matmul(v), k, v


def bart(dim: int):
    def program(q, k, v, mask):
        b, h, n, d = q.shape
        weights = torch.bmm(q.reshape(b * h, -1, d), k.reshape(b * h, -1, d).transpose(1, 2))
        weights = (weights.view(b, h, n, -1) + mask).view(b * h, n, -1)
        weights = F.softmax(weights, dim=dim)
        return torch.bmm(weights, v.reshape(b * h, -1, d)).view(b, h, n, d)

    return program


_add("T5", "the bias in place, softmax in float32", t5, _floats(1, 3, 6, 6))
_add("T5, over heads", "softmax over the heads", t5_over_heads, _floats(1, 3, 6, 6), "decline")
_add("Bart", "bmm with views around the mask", bart(-1), plus((2, 1, 6, 6)))
_add("Bart, over queries", "softmax over the queries", bart(1), plus((2, 1, 6, 6)), "decline")
_add("Bart, over batch", "softmax over batch and heads", bart(0), plus((2, 1, 6, 6)), "decline")


def visformer(q, k, v):
    """Dropout of everything, in a spelling that takes any probability."""
    p = torch.matmul(q, k.transpose(-2, -1)).mul(0.35).softmax(dim=-1)
    return F.dropout(p, p=1.0, training=True).matmul(v)


suite.equal(lambda r: r.qkv(), modes=(INFERENCE,))(visformer)
_HALVES = ("T5", "where", "padding, empty sequence, finfo.min", "bias (2, 1, 1, 6)", "div, over -2")
suite.programs += in_dtype([p for p in suite if p.name.split("/")[1] in _HALVES], torch.bfloat16)
