"""Products of matrices that are written by elements, multiplied and summed, and softmaxes side by side."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, crossed, form, keep, rand
from torch import Tensor, nn


@form(lambda s: [*crossed(s)[:3]], dynamic=True)
def multiplied_and_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def _memory(s: Sizes) -> list[Any]:
    """A state for each sequence and what it looks up; padded."""
    return [rand(s.batch, s.width), rand(s.batch, s.length, s.width), keep(s)]


@form(_memory, mask="operand")
def a_state_looks_up_its_memory(state: Tensor, memory: Tensor, present: Tensor) -> Tensor:
    scores = torch.sum(memory * state.unsqueeze(1) * 0.125, 2).masked_fill(~present, -1e9)
    return torch.sum(memory * F.softmax(scores, dim=1).unsqueeze(2), dim=1)


@form(lambda s: [rand(2, s.width, 6, 5)])
class NeighboursOfAPixel(nn.Module):
    """A query of its own for each pixel, keys from its neighbourhood."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.qkv = nn.Conv2d(s.width, 3 * s.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).chunk(3, 1)
        k, v = (F.unfold(t, 3, padding=1).view(b, self.heads, self.dim, 9, h * w) for t in (k, v))
        scores = (q.reshape(b, self.heads, self.dim, 1, h * w) * k).mean(2, keepdim=True)
        return (scores.softmax(3) * v).sum(3).view(b, c, h, w)


@form(lambda s: [rand(2, s.length, s.width), rand(2, s.length, s.length, s.width)])
def edges_added_to_keys_and_values(x: Tensor, edges: Tensor) -> Tensor:
    """Dense graph attention: each pair of nodes has a key of its own."""
    b, n, _ = x.shape
    nodes, pairs = x.view(b, n, 4, 16), edges.view(b, n, n, 4, 16)
    scores = (nodes[:, :, None] * (nodes[:, None] + pairs)).sum(-1) / 4
    return (scores.softmax(2)[..., None] * (nodes[:, None] + pairs)).sum(2)


@form(lambda s: [rand(s.batch, s.length, s.width)], sites=2, mask="free")
class Adapter(nn.Module):
    """LLaMA-Adapter: learned keys in front, with a softmax of their own that a gate starts at zero."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.dim = s.heads, s.dim
        self.q, self.k, self.v = (nn.Linear(s.width, s.width, bias=False) for _ in range(3))
        self.prompt, self.gate = nn.Parameter(torch.randn(1, 10, s.width)), nn.Parameter(torch.randn(1, s.heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, self.dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        more = [
            p(self.prompt).view(1, 10, self.heads, self.dim).repeat(b, 1, 1, 1).transpose(1, 2)
            for p in (self.k, self.v)
        ]
        keys, values = torch.cat([more[0], k], dim=2), torch.cat([more[1], v], dim=2)
        mask = torch.full((n, n), float("-inf"), device=x.device).triu(1)
        mask = torch.cat([torch.zeros(n, 10, device=x.device), mask], dim=-1).to(x.dtype)
        scores = torch.matmul(q, keys.transpose(2, 3)) / math.sqrt(self.dim) + mask
        front, rest = (F.softmax(part.float(), dim=-1).type_as(q) for part in (scores[..., :10], scores[..., 10:]))
        weights = torch.cat([self.gate.tanh() * front, rest], dim=-1)
        return torch.matmul(weights, values).transpose(1, 2).reshape(b, n, c)


@form(sites=1)
def the_last_query_of_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25)[:, :, -1].softmax(-1).unsqueeze(2) @ v
