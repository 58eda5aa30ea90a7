"""What SDPA has no argument for: soft caps, sinks, clamps; on a programmable kernel, or folded into SDPA's operands."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, grouped, heads_first, root
from attention_forms.heads import repeat_kv
from torch import Tensor, nn

_CAP: dict[str, Any] = {"target": "flex"}


@form(mask="free", **_CAP)
def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores / 5.0
    scores = torch.tanh(scores)
    scores = scores * 5.0
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@form(grouped, mask="free", **_CAP)
def softcap_with_groups_and_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma 2: capped, then masked with finfo.min."""
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    scores = 20.0 * torch.tanh(scores / 20.0)
    n = q.shape[2]
    allowed = torch.arange(n)[None, :] <= torch.arange(n)[:, None]
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


@form(mask="free", **_CAP)
def softcap_method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grok: 0.08838834764831845 and 30, with the cap as a method chain."""
    return (30.0 * (q @ k.mT * 0.08838834764831845 / 30.0).tanh()).softmax(-1) @ v


@form(mask="free", **_CAP)
def softcap_with_rows_without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma 2, padded on the left: all keys of a row carry the lowest number, and a gradient flows through the cap."""
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25 / 5.0) * 5.0
    n, m = q.shape[2], k.shape[2]
    allowed = (torch.arange(m) <= torch.arange(n)[:, None]) & (torch.arange(m) > 3)
    scores = scores + torch.where(allowed, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return torch.matmul(F.softmax(scores, dim=-1), v)


@form(mask="free", target="either", train="decline")
def clipped_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nothing but a programmable kernel can say it, and none need be taken."""
    return torch.softmax((q @ k.mT * 0.25).clamp(-1.0, 1.0), dim=-1) @ v


class _Sinks(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(s.heads))


@form(grouped, target="fused", mask="free")
class SinksDroppedAfterwards(_Sinks):
    """gpt-oss: a learned logit per head as one more column, dropped after the softmax."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        combined = torch.cat([scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined, dim=-1, dtype=combined.dtype)
        return torch.matmul(probs[..., :-1], v)


@form(target="fused", mask="free")
class SinksInFrontAndCausal(_Sinks):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, n, d = q.shape
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(d)
        scores = scores + torch.full((n, n), float("-inf"), dtype=q.dtype).triu(1)
        scores = torch.cat([self.sinks.view(1, h, 1, 1).expand(b, h, n, 1), scores], dim=3)
        weights = torch.softmax(scores, dim=-1)[:, :, :, 1:]
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@form(grouped, target="fused", mask="free")
class SinkBehindTheProduct(_Sinks):
    """Granite: the result times sigmoid(logsumexp - sink), which is a column more in the softmax."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), torch.finfo(q.dtype).min)
        lse = torch.logsumexp(scores, dim=-1)
        share = (lse - self.sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(probs, v) * share.unsqueeze(-1).to(q.dtype)


@form(target="fused", mask="free")
class SinkOfTheWeights(_Sinks):
    """The weights' own gate, with a sink per head; the result is laid out anew before it is used."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        gate = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - self.sinks[:, None, None])
        return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1) * gate, v)


@form(target="fused", mask="free")
def sink_of_logit_zero_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sigmoid(logsumexp): one more in the denominator, after the heads went behind the queries."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return (out * scores.logsumexp(-1).sigmoid().transpose(1, 2).unsqueeze(-1)).transpose(1, 2)


@form(heads_first, target="fused", mask="free")
class SinkKeysAndValues(nn.Module):
    """`add_bias_kv`: one learned key and value more; plain attention over a longer sequence."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.k, self.v = (nn.Parameter(torch.randn(1, s.heads, 1, s.dim)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat([self.k.expand(q.shape[0], -1, -1, -1), k], dim=2)
        v = torch.cat([self.v.expand(q.shape[0], -1, -1, -1), v], dim=2)
        return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


@form(target="fused", mask="operand")
class SlidingWindowCached(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        ones = torch.ones(64, 64, dtype=torch.bool)
        self.register_buffer("window", ones.tril().logical_and(ones.triu(-5)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.window[:n, :n], torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v


@form(target="fused", mask="operand", dynamic=True)
def sliding_window_of_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    allowed = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < 6)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = torch.where(allowed, scores, float("-inf"))
    return scores.softmax(-1) @ v


@form(target="fused", mask="operand", scale=root)
def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama 4: queries see their own chunk of 8 positions, up to themselves."""
    i = torch.arange(q.shape[2], device=q.device)
    allowed = (i[None, :] // 8 == i[:, None] // 8) & (i[None, :] <= i[:, None])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(allowed.logical_not(), -1e9)
    return scores.softmax(-1) @ v
