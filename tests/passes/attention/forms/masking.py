"""Masks as people apply them: fills, additive masks, in place, from the caller, from the module."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, flat, form, heads_first, keep, rand, root, tokens
from torch import Tensor, nn


@form(tokens, mask="causal", scale=root, dynamic=True)
class NanoGPT(nn.Module):
    """The buffer `bias`, cut to the length and compared with 0; dropout modules that do nothing here."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))
        self.n_head, self.n_embd = s.heads, s.width

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


@form(mask="causal")
class WhereWithABoolBuffer(nn.Module):
    """GPT-2: a bool buffer sliced by key and query length, and a 0-d tensor of finfo.min as the other branch."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        bias = torch.tril(torch.ones((64, 64), dtype=torch.bool)).view(1, 1, 64, 64)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = torch.matmul(q, k.transpose(-1, -2))
        w = w / torch.full([], v.size(-1) ** 0.5, dtype=w.dtype, device=w.device)
        query_length, key_length = q.size(-2), k.size(-2)
        causal_mask = self.bias[:, :, key_length - query_length : key_length, :key_length]
        mask_value = torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype, device=w.device)
        w = torch.where(causal_mask, w.to(w.dtype), mask_value)
        return torch.matmul(nn.functional.softmax(w, dim=-1).type(v.dtype), v)


def _padded(s: Sizes) -> list[Any]:
    return [*heads_first(s), keep(s)]


@form(_padded, mask="operand")
def weights_of_nan_set_to_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A sequence of padding alone is zeros, in the way that kernels have of themselves."""
    scores = (q @ k.mT * 0.25).masked_fill(~mask[:, None, None, :], -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@form(_padded, mask="operand", scale=root, dynamic=True)
def padding_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The annotated transformer: mask == 0 filled with -1e9."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(mask.unsqueeze(1).unsqueeze(2) == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), v)


@form(_padded, mask="operand", scale=root)
def padding_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Bert: 1 - mask, times finfo.min, added."""
    extended = mask[:, None, None, :].to(dtype=q.dtype)
    extended = (1.0 - extended) * torch.finfo(q.dtype).min
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + extended
    return torch.matmul(nn.functional.softmax(scores, dim=-1), v)


@form(_padded, mask="operand", scale=root)
def padding_added_weakly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """-1e4 as in the first Bert: a number, not minus infinity."""
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return ((q @ k.mT) * q.shape[-1] ** -0.5 + extended).softmax(-1) @ v


@form(lambda s: [*flat(s), keep(s).repeat_interleave(s.heads, 0)], mask="operand")
def padding_inverted_3d(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`key_padding_mask` of fairseq: True where padded, heads in the batch."""
    weights = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
    weights = weights.masked_fill((~mask).unsqueeze(1), float("-inf"))
    return torch.bmm(F.softmax(weights, dim=-1), v)


@form(_padded, mask="operand", scale=root)
def filled_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores.masked_fill_(~mask[:, None, None], -torch.finfo(scores.dtype).max)
    return scores.softmax(dim=-1) @ v


@form(_padded, mask="operand", scale=root)
def filled_by_a_function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = torch.masked_fill(scores, mask[:, None, None].logical_not(), torch.tensor(float("-inf")))
    return scores.softmax(dim=-1) @ v


@form(_padded, mask="operand", scale=root)
def filled_by_where(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = torch.where(mask[:, None, None, :], scores, torch.tensor(-1e9, dtype=scores.dtype))
    return scores.softmax(dim=-1) @ v


@form(_padded, mask="operand", scale=root)
def filled_by_index(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    blocked = (~mask)[:, None, None, :].expand_as(scores)
    scores = scores.masked_fill(blocked, torch.finfo(torch.float32).min if scores.dtype == torch.float32 else -1e30)
    return scores.softmax(dim=-1) @ v


@form(
    lambda s: [*heads_first(s), torch.randn(s.batch, 1, s.length, s.length)], mask="operand", scale=root, dynamic=True
)
def a_float_mask_from_the_caller(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores + mask[:, :, :, : k.shape[-2]]
    return torch.matmul(nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


@form(_padded, mask="operand", scale=root)
def causal_and_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    n = q.shape[2]
    causal = torch.tril(torch.ones(n, n, dtype=torch.bool))
    allowed = causal[None, None] & mask[:, None, None, :]
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -1e9)
    return scores.softmax(dim=-1) @ v


@form(_padded, mask="operand", scale=root, train="either")
def causal_then_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A fill, then a number added: bfloat16 loses scores beside -1e4, and with them what a kernel would pass on."""
    n = q.shape[2]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    scores = scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * -1e4
    return scores.softmax(dim=-1) @ v


@form(_padded, mask="operand", scale=root)
def padded_on_both_sides(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Rows of padding are masked whole, with a finite fill: their weights are uniform."""
    both = mask[:, None, :, None] & mask[:, None, None, :]
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~both, torch.finfo(q.dtype).min)
    return scores.softmax(dim=-1) @ v


@form(lambda s: [*heads_first(s), torch.rand(s.heads, s.length, s.length) < 0.7], mask="operand", scale=root)
def a_pattern_per_head(q: Tensor, k: Tensor, v: Tensor, pattern: Tensor) -> Tensor:
    """BigBird-like: each head has its own sparse pattern; the diagonal is always seen."""
    pattern = pattern | torch.eye(q.shape[2], dtype=torch.bool)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~pattern, -1e30).softmax(dim=-1) @ v


@form(_padded, target="either", mask="free")
def multiplied_then_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """GPT-1: w * b - 1e4 * (1 - b). The product changes scores that the sum then hides."""
    b = mask[:, None, None, :].to(q.dtype)
    w = q @ k.mT * q.shape[-1] ** -0.5
    return (w * b + -1e4 * (1 - b)).softmax(-1) @ v


@form(lambda s: [rand(s.length, s.batch, s.width), keep(s)], mask="operand", train="either")
class AttentionMaskAndKeyPadding(nn.Module):
    """Fairseq's decoder: an additive causal mask, then key padding in a view of four dimensions.

    Nothing says that a row keeps a key, and the gradient of a row of NaN differs by how it was masked.
    """

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.q, self.k, self.v = (nn.Linear(s.width, s.width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, b, c = x.shape
        q = (self.q(x) * self.dim**-0.5).view(n, b * self.heads, self.dim).transpose(0, 1)
        k, v = (f(x).view(n, b * self.heads, self.dim).transpose(0, 1) for f in (self.k, self.v))
        weights = torch.bmm(q, k.transpose(1, 2))
        weights += torch.triu(torch.full((n, n), float("-inf"), dtype=x.dtype), 1).unsqueeze(0)
        weights = weights.view(b, self.heads, n, n)
        weights = weights.masked_fill((~mask).unsqueeze(1).unsqueeze(2), float("-inf"))
        weights = weights.view(b * self.heads, n, n)
        probs = F.softmax(weights.float(), dim=-1).type_as(weights)
        return torch.bmm(probs, v).transpose(0, 1).reshape(n, b, c)


class _Triangle(nn.Module):
    """A lower triangle of ones, longer than any sequence."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.register_buffer("triangle", torch.tril(torch.ones(2 * s.keys, 2 * s.keys))[None, None])


@form(mask="causal")
class MultipliedByAMask(_Triangle):
    """`w * b + c * (1 - b)`: what b hides is c, whatever the score was."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        b = self.triangle[:, :, : w.size(-2), : w.size(-1)].to(w.dtype)
        return (w * b + -1e10 * (1 - b)).softmax(-1) @ v


@form(lambda s: [*heads_first(s), keep(s)], mask="operand")
def multiplied_by_a_padding_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    w, m = q @ k.mT * 0.25, keep[:, None, None].to(q.dtype)
    return (m * w - (1.0 - m) * 1e9).softmax(-1) @ v


def _rows(s: Sizes) -> list[Any]:
    """Each query sees keys of its own, the first query none."""
    seen = torch.rand(s.batch, 1, s.length, s.length) < 0.6
    seen[:, :, 0] = False
    return [*heads_first(s), seen]


@form(_rows, mask="operand", train="either")
def nan_replaced_by_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`where(isnan(p), 0, p)`: `nan_to_num` spelled out."""
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.where(torch.isnan(p), torch.zeros_like(p), p) @ v


@form(_rows, mask="operand")
def zeros_where_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`where(mask, p, 0)` beside `masked_fill(~mask, ...)`: one mask, once negated."""
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -1e9).softmax(-1)
    return torch.where(mask, p, 0.0) @ v


@form(_rows, mask="operand")
def rows_set_to_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Flamingo: text before the first image sees nothing, and gets zeros."""
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1)
    return p.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v


@form(_rows, mask="operand")
def rows_of_nan_set_to_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with minus infinity: NaN before, which the fill keeps from flowing back."""
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return p.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v
