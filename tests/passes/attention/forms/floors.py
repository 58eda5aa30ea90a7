"""Scores kept from minus infinity, columns of a number, biases of known size, masks made inside one operation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, grouped, heads_first, keep, rand, root
from torch import Tensor, nn


def _padded(s: Sizes) -> list[Any]:
    return [*heads_first(s), keep(s)]


@form(_padded, mask="operand", scale=root, dynamic=True)
def added_then_clamped(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """OPT and XGLM: a mask of finfo.min is added, and the sum is not let below it."""
    low = torch.finfo(q.dtype).min
    seen = attention_mask[:, None, None, :] & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, low)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min, device=scores.device))
    return F.softmax(scores, dim=-1) @ v


@form(mask="causal", scale=root)
def causal_then_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.full((q.shape[2], q.shape[2]), -math.inf, dtype=q.dtype).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias).clamp(min=torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


@form(target="fused", mask="free")
def off_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A logit of zero that nothing is read from ("attention is off by one")."""
    return F.pad(q @ k.mT * q.shape[-1] ** -0.5, (0, 1)).softmax(-1)[..., :-1] @ v


@form(grouped, target="fused", mask="free")
def number_in_front_and_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * 0.25).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf)
    return F.pad(scores, (1, 0), value=-1.5).softmax(-1)[..., 1:] @ v


@form(mask="operand")
def alibi_and_causal_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is added is small, though its numbers are not listed."""
    heads, length = q.shape[1:3]
    slopes = torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5 + (slopes[:, None, None] * distance).to(q.dtype)
    return scores.masked_fill(distance > 0, -math.inf).softmax(-1) @ v


@form(_padded, mask="operand")
def alibi_and_padding_fill(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """MPT: rows may have no key, and all their scores are replaced."""
    heads, length = q.shape[1:3]
    slopes = 1.0 / torch.pow(2, torch.arange(1, heads + 1).float() * 8 / heads)
    alibi = torch.arange(1 - length, 1, dtype=torch.int32).view(1, 1, length) * slopes.view(heads, 1, 1)
    hidden = ~attention_mask[:, None, None, :] | torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.25 + alibi.to(q.dtype)
    scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.softmax(scores.float(), dim=-1).to(v.dtype) @ v


def _speech(s: Sizes) -> list[Any]:
    return [rand(s.batch, s.length, s.width), keep(s), torch.randn(s.batch * s.heads, s.length, s.length)]


@form(_speech, mask="operand")
class BiasAndPaddingInOneOperation(nn.Module):
    """WavLM: `multi_head_attention_forward` makes its mask in memory of its own."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.width = s.heads, s.width
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(s.width, s.width) for _ in range(4))

    def forward(self, x: Tensor, attention_mask: Tensor, bias: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        padding = torch.zeros(attention_mask.shape, dtype=x.dtype).masked_fill(~attention_mask, -math.inf)
        out, _ = F.multi_head_attention_forward(
            x, x, x, self.width, self.heads, torch.empty([0]),
            torch.cat((self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)), None, None, False, 0.0,
            self.out_proj.weight, self.out_proj.bias, self.training, padding, need_weights=True, attn_mask=bias,
            use_separate_proj_weight=True, q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
        )  # fmt: skip
        return out.transpose(0, 1)


@form(target="fused", train="decline", mask="free", reason="so large that a backward")
def off_the_top_and_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores within the range of float16, which the maximum of their row was taken off."""
    scores = q @ k.mT
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.clamp(min=-50000).clamp(max=50000).softmax(-1) @ v
