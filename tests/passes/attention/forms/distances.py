"""Biases made of contents and distances beside masks that replace scores; sizes that are products of others."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, keep, rand, root, tokens
from torch import Tensor, nn


class _Relative(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.qkv = nn.Linear(s.width, 3 * s.width, bias=False)
        self.positions = nn.Parameter(torch.randn(s.heads, 40, s.dim))

    def split(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)]


@form(tokens, mask="operand", scale=root)
class SkewedAndCausal(_Relative):
    """Music Transformer: positions skewed into place, and minus infinity for what comes after."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        b, h, n, _ = q.shape
        skewed = F.pad(q @ self.positions[:, -n:].mT, (1, 0)).reshape(b, h, n + 1, n)[:, :, 1:, :]
        scores = (q @ k.mT + skewed) / math.sqrt(self.dim)
        scores = scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf"))
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def _speech(s: Sizes) -> list[Any]:
    return [*tokens(s), keep(s)]


@form(_speech, mask="operand", scale=root)
class ShiftedPaddedAndZeroed(_Relative):
    """ESPnet's Conformer: the lowest number for padding, whose weights are set to zero once more."""

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        q, k, v = self.split(x)
        b, h, n, _ = q.shape
        bd = torch.matmul(q, self.positions[:, : 2 * n - 1].transpose(-2, -1))
        bd = torch.cat([torch.zeros((b, h, n, 1), dtype=bd.dtype), bd], dim=-1).view(b, h, -1, n)
        bd = bd[:, :, 1:].reshape(b, h, n, -1)[..., :n]
        hidden = present[:, None, None, :].eq(0)
        scores = ((torch.matmul(q, k.transpose(-2, -1)) + bd) / math.sqrt(self.dim)).masked_fill(
            hidden, torch.finfo(x.dtype).min
        )
        weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
        return torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, n, -1)


def _disentangled(s: Sizes) -> list[Any]:
    return [*heads_first(s), rand(2, s.heads, 40, s.dim), keep(s)]


@form(_disentangled, mask="operand")
def disentangled_padded_and_zeroed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, present: Tensor) -> Tensor:
    """DeBERTa: queries on distances and keys on distances, added up; the weights of padding are set to zero."""
    n = q.shape[-2]
    scale = torch.sqrt(torch.tensor(q.shape[-1], dtype=torch.float) * 3).to(q.dtype)
    distance = (torch.arange(n)[:, None] - torch.arange(n) + 20).expand(*q.shape[:2], n, n)
    rel_att = 0
    rel_att += torch.gather(q @ positions[0].mT, -1, distance) / scale
    rel_att += torch.gather(k @ positions[1].mT, -1, distance.mT).mT / scale
    hidden = ~(present[:, None, None] & present[:, None, :, None])
    scores = (q @ (k.mT / scale) + rel_att).masked_fill(hidden, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(hidden, 0) @ v


def _biased_and_padded(s: Sizes) -> list[Any]:
    return [*heads_first(s), rand(s.heads, s.length, s.length), keep(s)]


@form(_biased_and_padded, mask="operand", scale=root)
def learned_bias_then_padding_filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, present: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return scores.masked_fill(~present[:, None, None, :], torch.finfo(q.dtype).min).softmax(dim=-1) @ v


@form(_biased_and_padded, mask="operand", scale=root)
def learned_bias_then_causal_filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, present: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")).softmax(dim=-1) @ v


def _image(s: Sizes) -> list[Any]:
    return [rand(s.batch, s.width, s.length // 2, s.length // 2)]


@form(_image, dynamic=True)
class NonLocalBlock(nn.Module):
    """Every pixel attends to every pixel: the lengths are products of sizes; values wider than keys."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.theta, self.phi = (nn.Conv2d(s.width, s.dim, 1) for _ in range(2))
        self.g = nn.Conv2d(s.width, 2 * s.dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        theta, phi, g = (f(x).view(b, f.out_channels, -1) for f in (self.theta, self.phi, self.g))
        pairs = torch.matmul(theta.permute(0, 2, 1), phi)
        y = torch.matmul(F.softmax(pairs, dim=-1), g.permute(0, 2, 1)).permute(0, 2, 1).contiguous()
        return y.view(b, -1, *x.size()[2:])


@form(tokens, mask="operand", scale=root)
class DecomposedDistances(_Relative):
    """MViTv2: distances in each direction are added to all scores but a class token's, in place."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        b, h, n, _ = q.shape
        side = n // 2
        scores = (q * self.dim**-0.5) @ k.transpose(-2, -1)
        places = q[:, :, n - 2 * side :].reshape(b, h, 2, side, -1)
        rows = torch.einsum("byhwc,hkc->byhwk", places.flatten(0, 1).view(b, h, 2, side, -1), self.positions[:2, :2])
        columns = torch.einsum("byhwc,wkc->byhwk", places, self.positions[:1, :side].expand(side, side, -1))
        scores[:, :, n - 2 * side :, n - 2 * side :] = (
            scores[:, :, n - 2 * side :, n - 2 * side :].view(b, -1, 2, side, 2, side)
            + rows[:, :, :, :, :, None]
            + columns[:, :, :, :, None, :]
        ).view(b, -1, 2 * side, 2 * side)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, -1)
