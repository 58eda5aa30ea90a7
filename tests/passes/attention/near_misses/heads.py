"""Repeated and shared heads: which head of k meets which head of q."""

from __future__ import annotations

import math

import torch
from attention_near_misses.program import Inputs, Suite, attend

suite = Suite("heads")


def grouped(r: Inputs) -> list[torch.Tensor]:
    """Six heads of queries, two of keys."""
    return [r.randn(2, 6, 5, 8), r.randn(2, 2, 5, 8), r.randn(2, 2, 5, 8)]


def grouped_square(r: Inputs) -> list[torch.Tensor]:
    """Four heads of queries, two of keys: tiling and interleaving differ and both have valid shapes."""
    return [r.randn(2, 4, 5, 8), r.randn(2, 2, 5, 8), r.randn(2, 2, 5, 8)]


def _heads(name: str, why: str, keys, values=None, inputs=grouped, **more) -> None:
    def program(q, k, v):
        return attend(q, keys(k), (values or keys)(v))

    suite.equal(inputs, name=name, why=why, **more)(program)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(3, dim=1)


def tiled(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, 3, 1, 1)


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, None].expand(2, 2, 3, 5, 8).reshape(2, 6, 5, 8)


def expanded_before(x: torch.Tensor) -> torch.Tensor:
    return x[:, None].expand(2, 3, 2, 5, 8).reshape(2, 6, 5, 8)


_heads("repeat_interleave", "grouped queries as they should be", interleaved)
_heads("repeat", "heads tiled, not interleaved: query head 1 meets key head 1, not 0", tiled)
_heads("expand and reshape", "grouped queries by expand", expanded)
_heads("expand before the heads", "heads tiled by expand on the other side", expanded_before)
_heads("keys interleaved, values tiled", "two orders of heads", interleaved, tiled)
_heads("keys tiled, values interleaved", "two orders of heads", tiled, interleaved)
_heads("keys interleaved, values reversed", "values take the other head", interleaved, lambda v: interleaved(v).flip(1))
_heads("index", "heads by index, in an order of their own", lambda x: x[:, torch.tensor([0, 1, 1, 0, 0, 1])])
_heads("index in order", "heads by index, as repeat_interleave would", lambda x: x[:, torch.tensor([0, 0, 0, 1, 1, 1])])
_heads("cat", "heads tiled by cat", lambda x: torch.cat([x, x, x], 1))
_heads("stack", "heads interleaved by stack and flatten", lambda x: torch.stack([x, x, x], 2).flatten(1, 2))
_heads("stack before", "heads tiled by stack and flatten", lambda x: torch.stack([x, x, x], 1).flatten(1, 2))
_heads("repeat_interleave over keys", "keys repeated, not heads: every key three times",
       lambda x: x.reshape(2, 1, 10, 8).expand(2, 6, 10, 8).repeat_interleave(3, 2))  # fmt: skip
_heads("first head alone", "one head for all", lambda x: x[:, :1].expand(2, 6, 5, 8))
_heads("one head by broadcast", "one head, broadcast by the product", lambda x: x[:, :1])
_heads("mean of heads", "the mean head for all", lambda x: x.mean(1, keepdim=True))
_heads("repeated features", "2 heads of 8 seen as 4 of 4, twice",
       inputs=lambda r: [r.randn(2, 4, 5, 4), *r.qkv(2, 2, 5, 8)[1:]],
       keys=lambda x: x.view(2, 2, 5, 2, 4).transpose(2, 3).reshape(2, 4, 5, 4))  # fmt: skip


@suite.equal(grouped)
def queries_grouped_in_five_axes(q, k, v):
    """q as (b, kv heads, group, q, d), k and v with an axis of one."""
    q = q.view(2, 2, 3, 5, 8)
    return attend(q, k[:, :, None], v[:, :, None]).view(2, 6, 5, 8)


@suite.equal(grouped)
def queries_grouped_the_other_way(q, k, v):
    """q as (b, group, kv heads, q, d): the tiled order."""
    q = q.view(2, 3, 2, 5, 8)
    return attend(q, k[:, None], v[:, None]).view(2, 6, 5, 8)


@suite.equal(grouped)
def groups_folded_into_queries(q, k, v):
    """The group is folded into the queries: six heads of five queries as two of fifteen."""
    return attend(q.view(2, 2, 15, 8), k, v).view(2, 6, 5, 8)


@suite.equal(grouped)
def groups_folded_and_causal_by_row(q, k, v):
    """The group is folded into the queries, and the mask is causal in the folded row: not in the query."""
    hidden = torch.arange(5)[None, :] > torch.arange(15)[:, None]
    return attend(q.view(2, 2, 15, 8), k, v, lambda s: s.masked_fill(hidden, -math.inf)).view(2, 6, 5, 8)


@suite.equal(grouped_square)
def einsum_over_groups(q, k, v):
    """Groups by einsum."""
    p = torch.einsum("bghqd,bgkd->bghqk", q.view(2, 2, 2, 5, 8), k).mul(8**-0.5).softmax(-1)
    return torch.einsum("bghqk,bgkd->bghqd", p, v).reshape(2, 4, 5, 8)


@suite.equal(grouped_square)
def einsum_over_groups_swapped(q, k, v):
    """Groups by einsum, group and head exchanged for v."""
    p = torch.einsum("bghqd,bgkd->bghqk", q.view(2, 2, 2, 5, 8), k).mul(8**-0.5).softmax(-1)
    return torch.einsum("bghqk,bhkd->bghqd", p, v).reshape(2, 4, 5, 8)
