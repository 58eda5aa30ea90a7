"""Terms that people add to the scores: ALiBi, relative positions, windows, content-to-position, learned or computed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, one, rand, root, tokens
from torch import Tensor, nn


def _with(*shape_of: str) -> Any:
    def inputs(s: Sizes) -> list[Any]:
        return [*heads_first(s), rand(*(1 if name == "1" else getattr(s, name) for name in shape_of))]

    return inputs


@form(_with("batch", "heads", "length", "length"), mask="operand", scale=root)
def full_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, dim=-1) @ v


@form(_with("heads", "length", "length"), mask="operand", scale=root)
def bias_of_heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, dim=-1) @ v


@form(_with("length"), mask="operand", scale=root)
def bias_of_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(bias + q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


@form(_with("heads", "1", "1"), mask="free")
def bias_that_cancels(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Constant along the keys: a softmax does not see it, and its gradient is zero but for rounding."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias.detach(), dim=-1) @ v


@form(_with("batch", "heads", "length", "length"), mask="operand", scale=root)
def added_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = scores.mul_(q.shape[-1] ** -0.5)
    scores += bias
    return torch.softmax(scores, dim=-1) @ v


@form(_with("heads", "length", "length"), mask="operand")
def subtracted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 - bias.exp(), dim=-1) @ v


@form(_with("heads", "length", "length"), mask="operand")
def two_biases_and_a_scale_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.mT + bias) * 0.25
    return torch.softmax(scores + bias.mT * 0.5, dim=-1) @ v


@form(mask="operand", scale=root)
class AlibiOfKeys(nn.Module):
    """Slopes times key positions, (heads, 1, keys): Bloom and MPT."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        slopes = 2.0 ** -(8.0 / s.heads * torch.arange(1, s.heads + 1))
        self.register_buffer("slopes", slopes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        alibi = self.slopes[:, None, None] * torch.arange(1 - k.shape[2], 1, dtype=q.dtype, device=q.device)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + alibi
        return torch.matmul(scores.softmax(dim=-1), v)


@form(mask="operand", scale=root)
class AlibiOfDistance(nn.Module):
    """Slopes times -|i - j|, made once and cut to the length; with the causal mask in the same tensor."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        slopes = torch.tensor([2.0 ** -(8.0 * (i + 1) / s.heads) for i in range(s.heads)])
        positions = torch.arange(64)
        relative = (positions[None, :] - positions[:, None]).abs().neg()
        bias = slopes.view(-1, 1, 1) * relative
        self.register_buffer("alibi", bias.masked_fill(positions[None, :] > positions[:, None], float("-inf")))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.alibi[:, :n, :n]
        return F.softmax(scores, dim=-1) @ v


@form(mask="operand", scale=one, dynamic=True)
class RelativeBuckets(nn.Module):
    """T5: an embedding of log-spaced distances, no scale, the bias needs a gradient."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.bias = nn.Embedding(32, s.heads)

    @staticmethod
    def bucket(relative: Tensor) -> Tensor:
        buckets = (relative > 0).to(torch.long) * 16
        relative = torch.abs(relative)
        large = 8 + (torch.log(relative.float() / 8) / math.log(128 / 8) * 8).to(torch.long)
        large = torch.min(large, torch.full_like(large, 15))
        return buckets + torch.where(relative < 8, relative, large)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = torch.arange(q.shape[2], dtype=torch.long, device=q.device)[:, None]
        memory = torch.arange(k.shape[2], dtype=torch.long, device=q.device)[None, :]
        values = self.bias(self.bucket(memory - context))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += values.permute([2, 0, 1]).unsqueeze(0)
        weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        return torch.matmul(weights, v)


class _Window(nn.Module):
    """Windows of 2 x 2 with a learned table of relative positions."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.scale = s.heads, s.dim**-0.5
        self.qkv = nn.Linear(s.width, 3 * s.width)
        self.table = nn.Parameter(torch.randn(9, s.heads))
        grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("index", relative[..., 0] * 3 + relative[..., 1])

    def bias(self) -> Tensor:
        table = self.table[self.index.view(-1)].view(4, 4, -1)
        return table.permute(2, 0, 1).contiguous()


def _windows(s: Sizes) -> list[Any]:
    """(batch x 6 windows, 4 tokens, width), and which of 6 windows may see what."""
    regions = torch.randint(0, 2, (6, 4))
    return [rand(s.batch * 6, 4, s.width), (regions[:, None, :] - regions[:, :, None]).ne(0).float() * -100.0]


@form(_windows, mask="operand", dynamic=True)
class ShiftedWindows(_Window):
    """Swin: the mask of -100 is added in five dimensions, windows apart from the batch."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self.bias().unsqueeze(0)
        windows = mask.shape[0]
        attn = attn.view(b // windows, windows, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, self.heads, n, n)
        return (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c)


@form(lambda s: [rand(s.batch * 6, 4, s.width)], mask="operand")
class PlainWindows(_Window):
    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1) + self.bias().unsqueeze(0)
        return (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c)


@form(lambda s: [rand(s.batch, 12, s.heads * s.dim)], mask="operand")
class WindowsOfASequence(_Window):
    """The partition into windows and back is part of the program."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        x = x.view(b, 2, n // 4, 2, c).permute(0, 2, 1, 3, 4).reshape(-1, 4, c)
        q, k, v = self.qkv(x).reshape(-1, 4, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = torch.softmax((q * self.scale) @ k.mT + self.bias(), dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(b, n // 4, 2, 2, c)
        return x.permute(0, 2, 1, 3, 4).reshape(b, n, c)


@form(tokens, mask="operand")
class BiasWithAClassToken(nn.Module):
    """BEiT: q and v have a bias, k has none; the table covers a class token."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.scale = s.heads, s.dim**-0.5
        self.query, self.value = nn.Linear(s.width, s.width), nn.Linear(s.width, s.width)
        self.key = nn.Linear(s.width, s.width, bias=False)
        self.table = nn.Parameter(torch.randn(s.length * s.length, s.heads))
        self.register_buffer("index", torch.randperm(s.length * s.length).view(s.length, s.length))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        bias = F.embedding(self.index.view(-1), self.table).view(n, n, -1).permute(2, 0, 1)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + bias.unsqueeze(0)
        return (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c)


@form(tokens, mask="operand")
class ContentToPosition(nn.Module):
    """DeBERTa: c2p and p2c terms, gathered by relative position, and a scale of sqrt(3 d)."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.q, self.k, self.v = (nn.Linear(s.width, s.width) for _ in range(3))
        self.positions = nn.Parameter(torch.randn(2 * s.length, s.width))

    def split(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:-1], self.heads, -1).permute(0, 2, 1, 3)
        return x.contiguous().view(-1, x.size(-2), x.size(-1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scale = torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float) * 3)
        scores = torch.bmm(q, k.transpose(-1, -2) / scale.to(dtype=q.dtype))
        position_k = self.split(self.k(self.positions).unsqueeze(0)).repeat(b, 1, 1)
        position_q = self.split(self.q(self.positions).unsqueeze(0)).repeat(b, 1, 1)
        index = torch.arange(n)[:, None] - torch.arange(n)[None, :] + n
        c2p = torch.gather(torch.bmm(q, position_k.mT), -1, index.expand(b * self.heads, n, n))
        p2c = torch.gather(torch.bmm(k, position_q.mT), -1, (2 * n - index).clamp(0, 2 * n - 1).expand_as(c2p))
        scores = scores + c2p / scale.to(q.dtype) + p2c.transpose(-1, -2) / scale.to(q.dtype)
        probs = torch.softmax(scores.view(b, self.heads, n, n), dim=-1)
        out = torch.bmm(probs.view(-1, n, n), v)
        return out.view(b, self.heads, n, -1).permute(0, 2, 1, 3).reshape(b, n, c)


@form(tokens, mask="operand")
class RelativeShift(nn.Module):
    """Transformer-XL: (q + u) k + shift((q + v) r)."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.scale = s.heads, s.dim**-0.5
        self.qkv = nn.Linear(s.width, 3 * s.width, bias=False)
        self.r = nn.Parameter(torch.randn(s.length, s.heads, s.dim))
        self.r_w_bias, self.r_r_bias = (nn.Parameter(torch.randn(s.heads, s.dim)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        ac = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        bd = torch.einsum("bind,jnd->bnij", q + self.r_r_bias, self.r)
        bd = F.pad(bd, (1, 0)).view(b, self.heads, n + 1, n)[:, :, 1:].view_as(bd)
        attn = (ac + bd).mul_(self.scale).softmax(dim=-1)
        return torch.einsum("bnij,bjnd->bind", attn, v).flatten(2)


@form(tokens, mask="operand", scale=root)
class BiasFromAnMLP(nn.Module):
    """Swin v2's continuous positions, or graph transformers' edge features: computed by layers."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.qkv = nn.Linear(s.width, 3 * s.width)
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, s.heads))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        at = torch.arange(n, dtype=x.dtype, device=x.device)
        bias = 16 * torch.sigmoid(self.mlp((at[:, None] - at[None, :])[..., None])).permute(2, 0, 1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attn = torch.softmax(q @ k.mT / self.dim**0.5 + bias, dim=-1)
        return (attn @ v).transpose(1, 2).flatten(2)


@form(tokens, mask="operand", scale=root)
class PairBiasAndMask(nn.Module):
    """AlphaFold's gated attention: a mask of -1e9, a bias of pairs, a gate on the output."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.q, self.k, self.v, self.gate = (nn.Linear(s.width, s.width, bias=False) for _ in range(4))
        self.pair = nn.Parameter(torch.randn(s.heads, s.length, s.length))
        self.register_buffer("present", (torch.arange(s.length) % 5 != 4).float())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for f in (self.q, self.k, self.v))
        biases = [(1e9 * (self.present - 1))[None, None, None, :], self.pair[None]]
        a = torch.matmul(q / math.sqrt(q.shape[-1]) * 1.0, k.permute(0, 1, 3, 2))
        for b in biases:
            a += b
        o = torch.matmul(torch.nn.functional.softmax(a, -1), v).transpose(-2, -3)
        return (o * torch.sigmoid(self.gate(x)).unflatten(-1, (self.heads, -1))).flatten(-2)
