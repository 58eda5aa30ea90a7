"""Scores that are filled with a low number first and scaled then: what is low any more has weights of its own."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite
from torch import nn

suite = Suite("fills_scaled")

LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


def masked(r: Inputs) -> list[torch.Tensor]:
    return [*r.qkv(), r.bools(2, 1, 1, 6)]


def _scaled(name: str, why: str, low, change) -> None:
    def program(q, k, v, keep):
        return change(low(q @ k.mT, keep)).softmax(-1) @ v

    suite.equal(masked, name=name, why=why)(program)


def _causal(name: str, why: str, fill: float, factor: float) -> None:
    def program(q, k, v):
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return ((q @ k.mT).masked_fill(hidden, fill) * factor).softmax(-1) @ v

    suite.equal(name=name, why=why)(program)


for _fill, _factor in ((-1e9, 1e-9), (-1e9, 1e-8), (-1e9, 1e-7), (LOWEST, 1e-38), (-1e30, 1e-30), (-1e5, 1e-4)):
    _scaled(f"{_fill:g} times {_factor:g}", "a masked score becomes a small number",
            lambda s, keep, fill=_fill: s.masked_fill(~keep, fill), lambda s, factor=_factor: s * factor)  # fmt: skip
    _causal(f"{_fill:g} times {_factor:g}, causal", "the same, causal", _fill, _factor)
_causal("-inf times 1e-9, causal", "minus infinity stays what it is", -math.inf, 1e-9)
_scaled("finfo.min over finfo.max", "a masked score becomes -1", lambda s, keep: s.where(keep, LOWEST),
        lambda s: s / HIGHEST)  # fmt: skip
_scaled("times 1e-5 twice", "low no more after the second", lambda s, keep: s.masked_fill(~keep, -1e9),
        lambda s: s * 1e-5 * 1e-4)  # fmt: skip
_scaled("added", "a mask of -1e9 is added", lambda s, keep: s + (~keep).to(s.dtype) * -1e9, lambda s: s * 1e-9)
_scaled("multiplied in", "as BERT's first mask", lambda s, keep: s * keep + (1 - keep.to(s.dtype)) * -1e9,
        lambda s: s * 1e-9)  # fmt: skip
_scaled("as a power of two", "exp2", lambda s, keep: s.masked_fill(~keep, -1e9), lambda s: s * 1e-9 * math.log2(math.e))


@suite.equal(masked)
def by_hand(q, k, v, keep):
    """A softmax by hand."""
    e = ((q @ k.mT).masked_fill(~keep, -1e9) * 1e-9).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@suite.equal(masked)
def zeroed_afterwards(q, k, v, keep):
    """The weights of masked keys are set to zero; they are part of the sum all the same."""
    p = ((q @ k.mT).masked_fill(~keep, -1e9) * 1e-9).softmax(-1)
    return p.masked_fill(~keep, 0.0) @ v


@suite.equal(lambda r: [*masked(r), r.randn(3)])
def beside_a_sink(q, k, v, keep, sink):
    """A sink for each head."""
    s = (q @ k.mT).masked_fill(~keep, -1e9) * 1e-9
    s = torch.cat([s, sink.view(1, 3, 1, 1).expand(2, 3, 6, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


class _Held(nn.Module):
    """As GPT-J divides by `scale_attn`, a tensor of no dims, behind its mask."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.register_buffer("scale_attn", torch.tensor(number))

    def forward(self, q, k, v):
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return ((q @ k.mT).masked_fill(hidden, -1e9) * self.scale_attn.to(q.dtype)).softmax(-1) @ v


class Small(_Held):
    """The number that is held makes masked scores small."""

    def __init__(self) -> None:
        super().__init__(1e-9)


class Negative(_Held):
    """It changes their sign."""

    def __init__(self) -> None:
        super().__init__(-0.5)


class Changed(_Held):
    """It is another one at the next calls: small, and negative."""

    def __init__(self) -> None:
        super().__init__(0.35)


class Written(_Held):
    """The program halves it itself."""

    def __init__(self) -> None:
        super().__init__(0.35)

    def forward(self, q, k, v):
        out = super().forward(q, k, v)
        self.scale_attn.mul_(0.5)
        return out


def another(module: nn.Module) -> None:
    module.scale_attn.mul_(-1e-9)


suite.equal()(Small)
suite.equal()(Negative)
suite.equal(then=(lambda r: r.qkv(), lambda r: r.qkv()), between=another)(Changed)
suite.equal(then=(lambda r: r.qkv(), lambda r: r.qkv()), modes=("inference",))(Written)
