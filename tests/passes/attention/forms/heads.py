"""Key heads shared by query heads: expanded, repeated, broadcast, grouped; and what only looks like it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, grouped, rand, root, tokens
from torch import Tensor, nn


def repeat_kv(hidden: Tensor, n_rep: int) -> Tensor:
    batch, kv_heads, slen, head_dim = hidden.shape
    if n_rep == 1:
        return hidden
    hidden = hidden[:, :, None, :, :].expand(batch, kv_heads, n_rep, slen, head_dim)
    return hidden.reshape(batch, kv_heads * n_rep, slen, head_dim)


@form(grouped, scale=root, gqa=True, dynamic=True)
def expanded_and_reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n_rep = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, n_rep), repeat_kv(v, n_rep)
    attn = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    attn = nn.functional.softmax(attn, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(attn, v).transpose(1, 2).contiguous()


@form(grouped, scale=root, gqa=True)
def repeat_interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


@form(grouped)
def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`repeat` puts the groups side by side: query head i reads key head i modulo 2, not i divided by 2."""
    k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


@form(grouped)
def stacked_and_flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (torch.stack([t, t], dim=2).flatten(1, 2) for t in (k, v))
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


@form(grouped)
def queries_in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Five dimensions: (batch, kv heads, group, length, dim) against (batch, kv heads, 1, length, dim)."""
    b, h, n, d = q.shape
    q = q.view(b, k.shape[1], h // k.shape[1], n, d)
    attn = torch.softmax(q @ k.unsqueeze(2).transpose(-2, -1) * d**-0.5, dim=-1)
    return (attn @ v.unsqueeze(2)).view(b, h, n, d)


@form(grouped)
def einsum_over_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = q.shape[-1]
    q = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhgnd,bhsd->bhgns", q, k) / d**0.5
    return torch.einsum("bhgns,bhsd->bhgnd", scores.softmax(-1), v).flatten(1, 2)


@form(lambda s: [rand(s.batch, s.length, s.dim), *(rand(5, s.keys, s.dim) for _ in range(2))])
def every_text_over_every_image(text: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Retrieval: one product of all queries and all keys, a softmax over those of each image."""
    scores = torch.einsum("aqd,bkd->abqk", text, keys) / text.shape[-1] ** 0.5
    return torch.einsum("abqk,bkd->abqd", scores.softmax(-1), values)


@form(lambda s: [rand(s.batch, s.heads, s.length, s.dim), *(rand(s.batch, 1, s.length, s.dim) for _ in range(2))])
def one_key_head_by_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


@form(lambda s: [rand(s.batch, s.heads, s.length, s.dim), *(rand(s.batch, s.length, s.dim) for _ in range(2))])
def one_key_head_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sim = torch.einsum("b h i d, b j d -> b h i j", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)


@form(tokens, scale=root)
class OneKeyHeadFoldedIntoQueries(nn.Module):
    """Santacoder: heads times length as the queries of one attention."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.c_attn = nn.Linear(s.width, s.width + 2 * s.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, kv = self.c_attn(x).split((c, 2 * self.dim), dim=2)
        k, v = kv.split((self.dim, self.dim), dim=-1)
        q = q.reshape(b, n * self.heads, self.dim)
        scores = torch.empty((b, n * self.heads, n), device=q.device, dtype=q.dtype)
        scores = torch.baddbmm(scores, q, k.transpose(-1, -2), beta=0, alpha=self.dim**-0.5)
        probs = F.softmax(scores.view(b, n, self.heads, n), dim=-1)
        return torch.bmm(probs.view(b, n * self.heads, n), v).view(b, n, c)


@form(tokens, gqa=True, mask="causal")
class GroupedRotaryCausal(nn.Module):
    """A decoder block's attention: grouped heads, rotary positions, an additive causal mask of finfo.min."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.h, self.kv, self.d = s.heads, s.kv_heads, s.dim
        self.q_proj = nn.Linear(s.width, self.h * self.d, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(s.width, self.kv * self.d, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(self.h * self.d, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.h, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.kv, self.d).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.kv, self.d).transpose(1, 2)
        q, k = self.rotate(q), self.rotate(k)
        k, v = repeat_kv(k, self.h // self.kv), repeat_kv(v, self.h // self.kv)
        mask = torch.full((n, n), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(diagonal=1)
        attn = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.d) + mask[None, None]
        attn = F.softmax(attn, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj(torch.matmul(attn, v).transpose(1, 2).contiguous().reshape(b, n, -1))

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * torch.tensor(
            [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03, 0.01, 0.005], dtype=x.dtype
        )
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def _shared(s: Sizes) -> list[Any]:
    return [rand(s.batch, s.heads, s.length, s.dim), rand(s.batch, s.kv_heads, s.length, s.dim)]


@form(_shared, gqa=True)
def keys_are_the_values(q: Tensor, kv: Tensor) -> Tensor:
    kv = repeat_kv(kv, 2)
    return torch.softmax(q @ kv.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ kv


@form(grouped)
def keys_grouped_values_not(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only the keys are shared by groups: `enable_gqa` wants both."""
    v = torch.cat([v, v.flip(1)], dim=1)
    return torch.softmax(q @ repeat_kv(k, 2).mT * q.shape[-1] ** -0.5, dim=-1) @ v


@form(grouped)
def heads_picked_by_index(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.tensor([0, 0, 1, 1])
    k, v = k[:, index], v.index_select(1, index)
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
