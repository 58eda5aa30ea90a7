"""What stands around an attention: autocast, checkpointing, no_grad, torch's own layers, caches of keys and values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, keep, rand, root, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.qkv, self.proj = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attn = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


@form(tokens, scale=root)
class Autocast(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@form(tokens, scale=root)
class AutocastSwitchedOffInside(_Attention):
    """T5-like safety: the scores are kept out of the lower precision."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            with torch.autocast("cpu", enabled=False):
                scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
                attn = scores.softmax(dim=-1)
                out = attn @ v.float()
            return self.proj(out.transpose(1, 2).flatten(2))


def _without_a_key(s: Sizes) -> list[Any]:
    """One sequence is nothing but padding."""
    return [*heads_first(s), keep(s) & (torch.arange(s.batch)[:, None] != 1)]


@form(_without_a_key, mask="operand")
def lowest_numbers_under_autocast(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """Float32's lowest number is minus infinity in bfloat16, which SDPA under autocast makes of its mask."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = (1.0 - present[:, None, None].float()) * torch.finfo(torch.float32).min
        return ((q @ k.mT * 0.25 + hidden).softmax(-1) @ v).float()


@form(lambda s: [*heads_first(s), *heads_first(s)[:2]], mask="free")
def a_wide_bias_under_autocast(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Made where autocast is off, and added in float32."""
    bias = torch.einsum("bhqd,bhkd->bhqk", a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ((q @ k.mT * 0.25 + bias).softmax(-1) @ v.to(q.dtype)).float()


@form(tokens, scale=root)
class Checkpointed(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention = _Attention(s)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.attention, x, use_reentrant=False)


@form(tokens, scale=root)
class WithoutGrad(nn.Module):
    """A frozen teacher in a model that trains."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.teacher, self.head = _Attention(s), nn.Linear(s.width, s.width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.teacher(x)
        return self.head(x + seen)


@form(tokens, scale=root, sites=2)
class TwoBlocks(nn.Module):
    """A residual stream, norms and a feed-forward part between two sites."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention = nn.ModuleList(_Attention(s) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(s.width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(s.width, 2 * s.width), nn.GELU(), nn.Linear(2 * s.width, s.width))

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm in zip(self.attention, self.norm, strict=True):
            x = x + attention(norm(x))
            x = x + self.mlp(x)
        return x


@form(tokens)
class MultiheadAttentionWithWeights(nn.Module):
    """torch's own layer; the weights are computed and nobody reads them."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(s.width, s.heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x + 0.0, x, x, need_weights=True)[0]


@form(lambda s: [*tokens(s), keep(s)], mask="operand")
class MultiheadAttentionMasked(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(s.width, s.heads, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n = x.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        return self.attention(x + 0.0, x, x, key_padding_mask=~mask, attn_mask=causal)[0]


def _cached(queries: int) -> Any:
    def inputs(s: Sizes) -> list[Any]:
        new = [rand(s.batch, s.heads, queries, s.dim) for _ in range(3)]
        return [*new, *(torch.randn(s.batch, s.heads, s.length, s.dim) for _ in range(2))]

    return inputs


@form(_cached(1), scale=root)
def decode_one(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    """One new token sees everything before it: no mask is needed, and `is_causal` would be wrong."""
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


@form(_cached(5), mask="operand", scale=root)
def decode_some(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    """Five new tokens after a cache: causal, but counted from the end."""
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    n, m = q.shape[2], k.shape[2]
    allowed = torch.ones(n, m, dtype=torch.bool).tril(diagonal=m - n)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def _static_cache(s: Sizes) -> list[Any]:
    new = [rand(s.batch, s.heads, 2, s.dim) for _ in range(3)]
    cache = [torch.randn(s.batch, s.heads, 32, s.dim) for _ in range(2)]
    return [*new, *cache, torch.tensor([7, 8])]


@form(_static_cache, mask="operand", scale=root)
def decode_into_a_static_cache(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, at: Tensor) -> Tensor:
    cache_k, cache_v = cache_k.index_copy(2, at, k), cache_v.index_copy(2, at, v)
    allowed = torch.arange(cache_k.shape[2])[None, :] <= at[:, None]
    scores = q @ cache_k.mT * q.shape[-1] ** -0.5
    scores = scores + torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return torch.softmax(scores, dim=-1) @ cache_v


@form(heads_first)
def weights_returned_by_a_helper_and_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The annotated transformer's helper gives (output, weights); the caller takes the first."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax(query @ key.transpose(-2, -1) / math.sqrt(query.size(-1)), dim=-1)
        return torch.matmul(p, value), p

    return attention(q, k, v)[0]


@form(tokens)
class WeightsInAListThatIsDropped(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.inner = _Attention(s)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.inner.qkv(x).chunk(3, dim=-1))
        p = torch.softmax(q @ k.mT * 0.25, dim=-1)
        seen.append(p.mean())
        return (p @ v).transpose(1, 2).flatten(2)


@form(tokens, scale=root)
class InAFunctionTransform(nn.Module):
    """Memory by recomputation of a part: q, k and v outside of the checkpoint, the core in it."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.inner = _Attention(s)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.inner.qkv(x).chunk(3, dim=-1))
        return self.inner.proj(checkpoint(self.core, q, k, v, use_reentrant=False).transpose(1, 2).flatten(2))
