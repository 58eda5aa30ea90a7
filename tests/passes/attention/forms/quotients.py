"""Softmaxes as quotients of exponentials: masked by factors, with more in the sum, finished behind the product."""

from __future__ import annotations

import math
from typing import Any

import torch
from attention_forms.base import Sizes, form, heads_first, rand
from torch import Tensor
from torch.nn import functional as F


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


@form()
def exponentials_times_a_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


@form()
def sums_put_back_by_index(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    return torch.exp(scores - torch.logsumexp(scores, dim=-1)[..., None]) @ v


@form()
def powers_of_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k) * math.log2(math.e)
    e = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def a_tiny_number_in_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum is at least 1, beside which 1e-9 is rounded away; no gradient is asked of the maximum."""
    scores = _scores(q, k)
    e = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@form(mask="causal")
def exponentials_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    e = e * torch.ones(scores.shape[-2:], device=q.device).tril().to(q.dtype)
    return (e / e.sum(-1, keepdim=True)) @ v


@form(mask="causal")
def exponentials_filled_with_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    e = torch.exp(scores - scores.amax(-1, keepdim=True)).masked_fill(hidden, 0.0)
    return (e / e.sum(-1, keepdim=True)) @ v


@form(mask="causal")
def a_triangle_of_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What Performer's kernels are compared with."""
    e = torch.tril(torch.exp(_scores(q, k)))
    return (e @ v) / e.sum(-1, keepdim=True)


@form(mask="causal")
def masked_after_a_softmax_and_normalised_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(_scores(q, k), dim=-1)
    p = torch.where(torch.ones_like(p, dtype=torch.bool).tril(), p, 0.0)
    return (p / p.sum(-1, keepdim=True)) @ v


def _with_logits(s: Sizes) -> list[Any]:
    return [*heads_first(s), rand(s.heads)]


@form(_with_logits)
def a_learned_logit_in_the_sum(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    scores, logit = _scores(q, k), logit.view(1, -1, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), logit)
    e = torch.exp(scores - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(logit - top))) @ v


@form(_with_logits)
def an_exponential_in_the_sum(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    e = torch.exp(_scores(q, k))
    return (e / (e.sum(-1, keepdim=True) + logit.exp()[:, None, None])) @ v


@form(mask="causal")
def divided_behind_heads_that_are_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(_scores(q, k)) * torch.ones(q.shape[-2], k.shape[-2]).tril().to(q.dtype)
    out = (e @ v).transpose(1, 2)
    return (out / e.sum(-1).transpose(1, 2)[..., None]).flatten(2)


@form()
def divided_behind_by_a_product_with_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(_scores(q, k))
    return (e @ v) / (e @ torch.ones(k.shape[-2], 1, dtype=q.dtype))


@form()
def divided_behind_by_sums_in_another_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.einsum("bhqd,bhkd->bhqk", q, k).div(math.sqrt(q.shape[-1])).exp()
    return torch.einsum("bhqk,bhkd->bqhd", e, v) / torch.einsum("bhqk->bqh", e)[..., None]


@form()
def normalised_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exponentials are not negative: what `F.normalize` divides by is their sum."""
    scores = _scores(q, k)
    return F.normalize(torch.exp(scores - scores.amax(-1, keepdim=True)), p=1.0, dim=-1) @ v
