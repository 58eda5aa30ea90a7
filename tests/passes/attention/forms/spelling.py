"""How people spell the two products and the softmax between them: einsum, matmul, bmm, baddbmm, loops over heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, flat, form, heads_first, heads_last, rand, root
from torch import Tensor, einsum, nn


@form(scale=root)
def einsum_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), v)


@form(heads_last, scale=root, dynamic=True)
def einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)


@form(heads_last)
def einsum_queries_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores (batch, queries, heads, keys): the softmax is over the last axis, the heads stand in the middle."""
    scores = einsum("bthd,bshd->bths", q * q.shape[-1] ** -0.5, k)
    return einsum("bths,bshd->bthd", F.softmax(scores, dim=-1), v)


@form(heads_last)
def einsum_keys_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores (batch, keys, queries, heads), as written in the annotated code of music transformers."""
    scores = einsum("bthd,bshd->bsth", q * q.shape[-1] ** -0.5, k)
    return einsum("bsth,bshd->bthd", F.softmax(scores, dim=1), v)


@form(scale=root)
def einsum_with_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sim = einsum("...id,...jd->...ij", q, k) * q.shape[-1] ** -0.5
    return einsum("...ij,...jd->...id", sim.softmax(dim=-1), v)


@form(scale=root)
def einsum_capitals_and_spaces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sim = einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    return einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)


@form(flat, scale=root)
def einsum_without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sim = einsum("b i d, b j d -> b i j", q, k) * q.shape[-1] ** -0.5
    return einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)


@form(flat, scale=root)
def einsum_of_lists(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Axes as integers."""
    scores = torch.einsum(q / math.sqrt(q.shape[-1]), [0, 1, 3], k, [0, 2, 3], [0, 1, 2])
    return torch.einsum(scores.softmax(-1), [0, 1, 2], v, [0, 2, 3], [0, 1, 3])


@form(lambda s: [rand(s.batch, s.length, s.heads, s.dim) for _ in range(3)])
def xformers_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The reference of memory-efficient attention: (batch, length, heads, dim), scale on the query."""
    scale = 1.0 / query.shape[-1] ** 0.5
    query = query * scale
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    attn = query @ key.transpose(-2, -1)
    attn = attn.softmax(-1)
    attn = F.dropout(attn, 0.0)
    attn = attn @ value
    return attn.transpose(1, 2).contiguous()


@form(flat, dynamic=True)
def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = torch.bmm(q, k.transpose(1, 2))
    attn = attn / (q.shape[-1] ** 0.5)
    return torch.bmm(F.softmax(attn, dim=2), v)


@form(flat)
def bmm_method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.mul(q.size(2) ** -0.5).bmm(k.transpose(2, 1)).softmax(2).bmm(v)


@form(flat)
def baddbmm_of_an_empty(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """beta=0: the first argument is not read, so it may hold anything."""
    buffer = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device)
    scores = torch.baddbmm(buffer, query, key.transpose(-1, -2), beta=0, alpha=query.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(dim=-1), value)


def _flat_with_bias(s: Sizes) -> list[Any]:
    return [*flat(s), torch.randn(s.batch * s.heads, 1, s.length)]


@form(_flat_with_bias, mask="operand")
def baddbmm_of_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.baddbmm(bias, q * q.shape[-1] ** -0.5, k.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, dim=-1), v)


@form(_flat_with_bias, mask="operand", scale=root)
def baddbmm_with_beta_and_alpha(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor) -> Tensor:
    """Bloom: the bias is the receiver, both factors are given, heads lie in the batch."""
    length = q.shape[1]
    scores = alibi.baddbmm(batch1=q, batch2=k.permute(0, 2, 1), beta=0.5, alpha=q.shape[-1] ** -0.5)
    scores = scores.view(-1, 4, length, length)
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(probs.view(-1, length, length), v)


@form(lambda s: [rand(s.length, s.dim) for _ in range(3)], scale=root)
def two_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, no batch."""
    return F.softmax(q @ k.T / q.shape[-1] ** 0.5, dim=-1) @ v


@form(lambda s: [rand(s.length, s.dim) for _ in range(3)])
def two_dimensions_with_mm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.mm(torch.softmax(torch.mm(q, k.t()) * 0.25, 1), v)


@form(lambda s: [rand(s.batch, s.length, s.dim) for _ in range(3)], scale=root)
def three_dimensions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    return torch.matmul(scores.softmax(dim=-1), value)


@form(lambda s: [rand(2, s.batch, s.heads, s.length, s.dim) for _ in range(3)], scale=root)
def five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Video: frames, batch, heads."""
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


@form(sites=4)
def a_loop_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h].transpose(-2, -1) / math.sqrt(q.shape[-1])
        out.append(scores.softmax(dim=-1) @ v[:, h])
    return torch.cat(out, dim=-1)


@form(lambda s: [rand(s.batch, s.length, s.width)], sites=2)
class AModulePerHead(nn.Module):
    """The tutorial's `MultiHeadAttention` that is a ModuleList of heads."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(s) for _ in range(2))
        self.proj = nn.Linear(2 * s.dim, s.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class _Head(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(s.width, s.dim, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        return F.softmax(wei, dim=-1) @ self.value(x)


@form(scale=root)
def softmax_over_the_second_last_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores transposed: (keys, queries), and the softmax over the keys."""
    scores = (k @ q.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return scores.softmax(dim=-2).transpose(-2, -1) @ v


@form(lambda s: [rand(s.batch, s.dim, 4, 5) for _ in range(3)])
def channels_first_image(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention block of VQGAN: (batch, channels, height, width), and the values times the weights."""
    b, c, h, w = q.shape
    q = q.reshape(b, c, h * w).permute(0, 2, 1)
    k = k.reshape(b, c, h * w)
    w_ = torch.bmm(q, k)
    w_ = w_ * (int(c) ** (-0.5))
    w_ = torch.nn.functional.softmax(w_, dim=2)
    v = v.reshape(b, c, h * w)
    w_ = w_.permute(0, 2, 1)
    return torch.bmm(v, w_).reshape(b, c, h, w)


@form(lambda s: [rand(s.batch, 3 * s.width, 4, 5)])
def heads_of_channels_of_an_image(qkv: Tensor) -> Tensor:
    """Lucidrains' diffusion: heads times dim in the channels, positions last."""
    b, c, h, w = qkv.shape
    q, k, v = (t.reshape(b, 4, c // 12, h * w) for t in qkv.chunk(3, dim=1))
    q = q * q.shape[2] ** -0.5
    sim = einsum("b h d i, b h d j -> b h i j", q, k)
    out = einsum("b h i j, b h d j -> b h i d", sim.softmax(dim=-1), v)
    return out.permute(0, 1, 3, 2).reshape(b, c // 3, h, w)


@form(heads_first)
def softmax_module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(nn.Softmax(dim=-1)(torch.matmul(q, k.transpose(2, 3)) * 0.25), v)


@form(heads_first, target="either")
def sums_of_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The products by broadcasting: right, if nobody sees a matmul in it."""
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * q.shape[-1] ** -0.5
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)
