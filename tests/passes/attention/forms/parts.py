"""Sums of weights, some of their heads or rows, values that share them; products that no one calls matmul."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, rand, tokens
from torch import Tensor, nn

INF = float("-inf")


@form(tokens, sites=2, mask="free")
class Differential(nn.Module):
    """Differential attention: two maps of half the width, one times a learned number taken off the other."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads // 2, s.dim
        self.qkv = nn.Linear(s.width, 3 * s.width, bias=False)
        self.factors = nn.Parameter(torch.randn(4, s.dim) * 0.1)
        self.norm = nn.RMSNorm(2 * s.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = (t.view(b, n, 2 * self.heads, self.dim).transpose(1, 2) for t in (q, k))
        v = v.view(b, n, self.heads, 2 * self.dim).transpose(1, 2)
        scores = q * self.dim**-0.5 @ k.transpose(-1, -2)
        scores = scores + torch.full((n, n), INF, dtype=scores.dtype).triu(1)
        maps = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
        f = self.factors
        weight = torch.exp((f[0] * f[1]).sum()) - torch.exp((f[2] * f[3]).sum()) + 0.8
        maps = maps.view(b, self.heads, 2, n, n)
        out = (maps[:, :, 0] - weight * maps[:, :, 1]) @ v
        return (self.norm(out) * 0.2).transpose(1, 2).reshape(b, n, c)


def _two(s: Sizes) -> list[Any]:
    return [*heads_first(s), *heads_first(s)[:2]]


@form(_two, sites=2, mask="free")
def the_mean_of_a_causal_and_a_full_map(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    near = (q @ k.mT * 0.25).masked_fill(torch.ones(q.shape[-2], k.shape[-2]).tril() == 0, INF).softmax(-1)
    return (0.5 * near + 0.5 * F.softmax(q2 @ k2.mT * 0.1, dim=-1)) @ v


@form(_two, sites=2, mask="causal")
def causal_maps_that_nearly_cancel(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    """A part in 16 is left of the first row, results and gradients: what is rounded before shows.

    No less: a kernel's float32 gradients of a row of one key, exactly zero in eager, are of the size of its rounding.
    """
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    near, far = ((a @ b.mT * 0.25).masked_fill(hidden, INF).softmax(-1) for a, b in ((q, k), (q2, k2)))
    return ((near - 0.9375 * far) @ v)[:, :, :1] * 16


@form()
def heads_sliced_after_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.25, dim=-1)[:, 1:3] @ v[:, :2]


@form()
def the_first_row_of_the_map(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A class token's row alone."""
    return torch.softmax(q @ k.mT * 0.25, dim=-1)[:, :, 0:1] @ v


@form(mask="operand")
def the_last_rows_of_a_causal_map(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * 0.25).masked_fill(hidden, INF).softmax(-1)[:, -1, -2:] @ v[:, -1]


@form(lambda s: [*heads_first(s)[:2], rand(5, s.batch, s.heads, s.length, s.dim)])
def values_in_batches_that_share_a_map(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.25, dim=-1) @ v


@form(lambda s: heads_first(Sizes(batch=1, heads=1, length=s.length, dim=s.dim)))
def linear_as_a_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t[0, 0] * 1.0 for t in (q, k, v))
    return F.linear(F.softmax(F.linear(q, k) / math.sqrt(q.shape[-1]), dim=-1), v.t())


@form(lambda s: [rand(s.length, s.dim), rand(s.keys, s.dim), rand(s.dim, s.keys)])
def linear_of_what_is_given(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.softmax(F.linear(q, k) / math.sqrt(q.shape[-1]), dim=-1), v)


@form(lambda s: [rand(s.batch, s.length, s.dim)], mask="operand")
class LearntKeysAndValues(nn.Module):
    """External attention: two linear layers with a softmax between them are an attention to a memory."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.keys = nn.Linear(sizes.dim, sizes.keys)
        self.values = nn.Linear(sizes.keys, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(F.softmax(self.keys(x) * 0.25, dim=-1))


@form(lambda s: [rand(s.batch, s.length, s.dim)], mask="operand")
class PooledByLearntQueries(nn.Module):
    """The queries are the rows of a linear layer's weight; its bias is the same for all keys of one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.queries = nn.Linear(sizes.dim, sizes.heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.queries(x).softmax(1).transpose(1, 2) @ x


@form()
def divided_by_both_lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
    return torch.softmax(q @ k.mT / lengths * 10.0, dim=-1) @ v


@form()
def maximum_taken_off_without_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    with torch.no_grad():
        top = scores.amax(dim=-1, keepdim=True)
    return (scores - top).softmax(-1) @ v
