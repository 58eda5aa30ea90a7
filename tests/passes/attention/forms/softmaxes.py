"""How people write the softmax: in float32, by hand, through log_softmax, with dropout on the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, flat, form, rand, root
from torch import Tensor, nn


@form(scale=root, dynamic=True)
def in_float32_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn_weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(attn_weights, v)


@form(scale=root)
def float_then_type_as(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)


@form()
def least_score_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DANet: scores are taken off the maximum of their row."""
    energy = q @ k.mT
    energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
    return energy.softmax(-1) @ v


@form(dynamic=True)
def off_the_largest_of_a_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """CogView: half precision does not overflow in scores that are small, and is given the rest in the softmax."""
    scores = q / 32 @ k.mT
    largest = scores.detach().view(*scores.shape[:2], -1).max(-1)[0][..., None, None]
    return ((scores - largest) * 32).softmax(-1) @ v


@form()
def products_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Diffusers with `upcast_attention`: the scores are computed in float32, the weights cast back."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


@form()
def everything_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).to(dtype)


@form(flat)
def baddbmm_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Diffusers' `get_attention_scores` and the product after it."""
    dtype = query.dtype
    query, key = query.float(), key.float()
    empty = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device)
    scores = torch.baddbmm(empty, query, key.transpose(-1, -2), beta=0, alpha=query.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(dim=-1).to(dtype), value)


@form()
def log_softmax_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1).exp() @ v


@form()
def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    e = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return (e / e.sum(dim=-1, keepdim=True)) @ v


@form()
def by_hand_with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.exp(scores - scores.logsumexp(dim=-1, keepdim=True)) @ v


@form(target="either")
def by_hand_without_the_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Overflows where a softmax does not, so it may be left alone."""
    e = torch.exp(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]))
    return (e / e.sum(dim=-1, keepdim=True)) @ v


@form()
def divided_after_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    e = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return (e @ v) / e.sum(dim=-1, keepdim=True)


@form()
def a_shift_that_cancels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores - scores.max(dim=-1, keepdim=True)[0].detach()
    return torch.softmax(scores, dim=-1) @ v


@form()
def dropout_of_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = F.dropout(torch.softmax(q @ k.mT * 0.25, dim=-1), p=0.0, training=True)
    return attn @ v


@form()
def dropout_that_is_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = torch.dropout(torch.softmax(q @ k.mT * 0.25, dim=-1), 0.5, False)
    return attn @ v


@form(train="decline", reason="dropout", dropout=0.3)
class DropoutModule(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = self.dropout(F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1))
        return torch.matmul(attn, v)


@form(train="decline", reason="dropout", dropout=0.2)
class DropoutFunction(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.p = 0.2

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = nn.functional.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype)
        return nn.functional.dropout(attn, p=self.p, training=self.training) @ v


@form()
class SoftmaxWithOneMore(nn.Module):
    """exp(x) / (1 + sum exp(x)): a sink of logit 0."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        e = torch.exp(scores - top)
        return e / (e.sum(-1, keepdim=True) + torch.exp(-top)) @ v


def _quantised(s: Sizes) -> list[Any]:
    return [*flat(s), torch.randint(0, 2, (s.batch * s.heads, 1, 1))]


@form(_quantised, target="either")
def weights_scaled_per_head(q: Tensor, k: Tensor, v: Tensor, head_mask: Tensor) -> Tensor:
    """A factor per head after the softmax: as well on the output."""
    probs = torch.softmax(torch.bmm(q, k.mT) * 0.25, dim=-1) * head_mask
    return torch.bmm(probs, v)


@form(lambda s: [*flat(s), rand(s.batch * s.heads, s.length, 1)], target="either")
def weights_gated_per_query(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 0.25, dim=-1) * gate.sigmoid(), v)
