"""Whole attention modules, for how they get q, k and v out of projections and put the heads together again."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, keep, rand, root, tokens
from torch import Tensor, nn


class _Packed(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim, self.scale = s.heads, s.dim, s.dim**-0.5
        self.qkv = nn.Linear(s.width, 3 * s.width)
        self.proj = nn.Linear(s.width, s.width)


@form(tokens, scale=root, dynamic=True)
class PackedSplit(_Packed):
    """split, view, transpose: nanoGPT without its mask."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


@form(tokens)
class PackedReshapePermuteUnbind(_Packed):
    """timm."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


@form(tokens, scale=root)
class PackedIndexed(_Packed):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


@form(tokens, scale=root)
class PackedPerHead(_Packed):
    """(batch, length, heads, 3 x dim), chunked last: q, k, v interleaved by head, as in GPT-NeoX."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3 * self.dim).transpose(1, 2).chunk(3, dim=-1)
        attn = torch.matmul(q, k.transpose(2, 3)) * self.scale
        out = torch.matmul(F.softmax(attn, dim=-1, dtype=torch.float32).to(v.dtype), v)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


@form(tokens)
class PackedMovedaxis(_Packed):
    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.dim))
        q, k, v = torch.movedim(qkv, (2, 3), (0, 2))
        attn = torch.einsum("bhid,bhjd->bhij", q, k).mul(self.scale).softmax(-1)
        return self.proj(torch.einsum("bhij,bhjd->bihd", attn, v).flatten(-2))


@form(tokens, scale=root)
class SeparateProjections(nn.Module):
    """Bert, with its `transpose_for_scores`."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.query, self.key, self.value = (nn.Linear(s.width, s.width) for _ in range(3))

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view((*x.size()[:-1], self.heads, self.dim)).permute(0, 2, 1, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        key = self.transpose_for_scores(self.key(hidden))
        value = self.transpose_for_scores(self.value(hidden))
        query = self.transpose_for_scores(self.query(hidden))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.dim)
        probs = nn.Softmax(dim=-1)(scores)
        context = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous()
        return context.view((*context.size()[:-2], self.heads * self.dim))


@form(lambda s: [rand(s.length, s.batch, s.width)])
class TimeFirst(nn.Module):
    """Fairseq: (time, batch, width), heads into the batch, bmm."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(s.width, s.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tgt_len, bsz, embed_dim = x.size()
        q = self.q_proj(x) * self.dim**-0.5
        q = q.contiguous().view(tgt_len, bsz * self.heads, self.dim).transpose(0, 1)
        k = self.k_proj(x).contiguous().view(-1, bsz * self.heads, self.dim).transpose(0, 1)
        v = self.v_proj(x).contiguous().view(-1, bsz * self.heads, self.dim).transpose(0, 1)
        weights = torch.bmm(q, k.transpose(1, 2))
        probs = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
        attn = torch.bmm(probs, v)
        return self.out_proj(attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim))


@form(lambda s: [rand(s.length, s.batch, s.heads, s.dim) for _ in range(3)])
def megatron(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(length, batch, heads, dim): views of heads in the batch, baddbmm into an empty buffer, views back."""
    sq, b, h, d = query.shape
    sk = key.shape[0]
    query, key = query.reshape(sq, b * h, d), key.reshape(sk, b * h, d)
    buffer = torch.empty(b * h, sq, sk, dtype=query.dtype, device=query.device)
    scores = torch.baddbmm(
        buffer, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=1.0 / math.sqrt(d)
    )
    probs = torch.softmax(scores.view(b, h, sq, sk), dim=-1)
    value = value.reshape(sk, b * h, d)
    context = torch.bmm(probs.view(b * h, sq, sk), value.transpose(0, 1))
    return context.view(b, h, sq, d).permute(2, 0, 1, 3).contiguous().view(sq, b, h * d)


@form(lambda s: [rand(s.batch, s.width, s.length), rand(s.batch, s.width, s.keys)])
class ConvolutionalQKV(nn.Module):
    """1 x 1 convolutions: channels first, keys from another sequence."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.q, self.k, self.v, self.o = (nn.Conv1d(s.width, s.width, 1) for _ in range(4))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(c), self.v(c)
        b, d, t_s, t_t = *k.size(), q.size(2)
        query = q.view(b, self.heads, d // self.heads, t_t).transpose(2, 3)
        key = k.view(b, self.heads, d // self.heads, t_s).transpose(2, 3)
        value = v.view(b, self.heads, d // self.heads, t_s).transpose(2, 3)
        scores = torch.matmul(query / math.sqrt(d // self.heads), key.transpose(-2, -1))
        out = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.o(out.transpose(2, 3).contiguous().view(b, d, t_t))


@form(lambda s: [rand(s.batch, s.length, s.width), rand(s.batch, s.keys, 40)])
class CrossAttention(nn.Module):
    """Context of another length and width; heads by reshape into the batch, as in latent diffusion."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.scale = s.heads, s.dim**-0.5
        self.to_q = nn.Linear(s.width, s.width, bias=False)
        self.to_k, self.to_v = (nn.Linear(40, s.width, bias=False) for _ in range(2))
        self.to_out = nn.Linear(s.width, s.width)

    def split(self, t: Tensor) -> Tensor:
        b, n, c = t.shape
        return t.reshape(b, n, self.heads, c // self.heads).permute(0, 2, 1, 3).reshape(b * self.heads, n, -1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in (self.to_q(x), self.to_k(context), self.to_v(context)))
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * self.scale
        out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        b, n, c = x.shape
        return self.to_out(out.reshape(b, self.heads, n, -1).permute(0, 2, 1, 3).reshape(b, n, c))


@form(lambda s: [rand(s.batch, s.keys, s.width)])
class PerceiverLatents(nn.Module):
    """Learned latents ask, latents and data answer."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.scale = s.heads, s.dim**-0.5
        self.latents = nn.Parameter(torch.randn(6, s.width))
        self.to_q, self.to_kv = nn.Linear(s.width, s.width, bias=False), nn.Linear(s.width, 2 * s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, h = x.shape[0], self.heads
        latents = self.latents.unsqueeze(0).expand(b, -1, -1)
        q = self.to_q(latents)
        k, v = self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("... i d, ... j d  -> ... i j", q * self.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        return torch.einsum("... i j, ... j d -> ... i d", sim.softmax(dim=-1), v).transpose(1, 2).flatten(2)


@form(tokens)
class PooledByOneQuery(nn.Module):
    """A learned query per head and one output vector per sequence."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(1, s.heads, 1, s.dim))
        self.kv = nn.Linear(s.width, 2 * s.width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        k, v = self.kv(x).view(b, n, 2, self.q.shape[1], -1).permute(2, 0, 3, 1, 4)
        attn = (self.q.expand(b, -1, -1, -1) * self.q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return (attn.softmax(dim=-1) @ v).squeeze(2).reshape(b, c)


@form(lambda s: [rand(s.batch, s.heads, s.length, s.dim), *heads_first(s)[:1], rand(s.batch, s.heads, s.length, 24)])
def values_of_another_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


@form(tokens)
class LatentKeysAndValues(nn.Module):
    """MLA: keys of a part per head and a rotary part that the heads share; narrower values."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.value = s.heads, 12, 4, 10
        self.q = nn.Linear(s.width, s.heads * 16)
        self.down = nn.Linear(s.width, 20 + self.rope)
        self.up = nn.Linear(20, s.heads * (self.nope + self.value))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        latent, shared = self.down(x).split([20, self.rope], dim=-1)
        up = self.up(latent).view(b, n, self.heads, -1).transpose(1, 2)
        k_nope, v = torch.split(up, [self.nope, self.value], dim=-1)
        shared = shared.view(b, n, 1, self.rope).transpose(1, 2)
        k = k_nope.new_empty(b, self.heads, n, self.nope + self.rope)
        k[..., : self.nope] = k_nope
        k[..., self.nope :] = shared
        attn = torch.matmul(q, k.transpose(2, 3)) * 16**-0.5
        attn = nn.functional.softmax(attn, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(attn, v).transpose(1, 2).reshape(b, n, -1)


def _two_kinds(s: Sizes) -> list[Any]:
    return [*heads_first(s), rand(s.batch, s.heads, s.length, 8), rand(s.batch, s.length, 8)]


@form(_two_kinds, mask="causal", scale=lambda s: (s.dim + 8) ** -0.5)
def latent_and_rotary_products(q: Tensor, k: Tensor, v: Tensor, q_pe: Tensor, k_pe: Tensor) -> Tensor:
    """MLA as DeepSeek writes it out: two products, the second of keys that the heads share."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + torch.einsum("bhqr,bkr->bhqk", q_pe, k_pe)
    scores = scores * (q.shape[-1] + q_pe.shape[-1]) ** -0.5
    scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1, dtype=torch.float32).type_as(q), v)


@form(lambda s: [*heads_first(s), *heads_first(Sizes(dim=8)), keep(s)], mask="operand", sites=2)
def text_and_layout(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, s: Tensor, w: Tensor, present: Tensor
) -> tuple[Tensor, Tensor]:
    """LiLT: two streams whose softmaxes read the sum of both streams' scores."""
    text, layout = q @ k.mT / math.sqrt(q.shape[-1]), r @ s.mT / math.sqrt(r.shape[-1])
    mask = (1.0 - present[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return (text + layout + mask).softmax(-1) @ v, (layout + text + mask).softmax(-1) @ w


def _rotary(s: Sizes) -> list[Any]:
    angle = torch.arange(s.length)[:, None] * 100.0 ** -torch.linspace(0, 1, s.dim // 2)
    angle = torch.cat((angle, angle), dim=-1)[None, None]
    return [*heads_first(s), angle.cos(), angle.sin()]


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


@form(_rotary, scale=root)
def rotary_in_front(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = (q * cos) + (rotate_half(q) * sin)
    k = (k * cos) + (rotate_half(k) * sin)
    attn = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return torch.matmul(F.softmax(attn, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2).contiguous()


@form(tokens, scale=root)
class TwoDimensionalSites(_Packed):
    """Axial attention: rows and columns of a grid in turn would be two sites; this folds one axis into the batch."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        x = x.view(b, 4, n // 4, c).transpose(1, 2).reshape(b * (n // 4), 4, c)
        q, k, v = (t.view(-1, 4, self.heads, self.dim).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-2, -1) * self.scale, -1) @ v
        return y.transpose(1, 2).reshape(b, n // 4, 4, c).transpose(1, 2).reshape(b, n, c)
