"""One softmax over the scores of several products, and weights that meet their values piece by piece."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_forms.base import Sizes, form, heads_first, rand
from torch import Tensor


def _blocks(s: Sizes) -> list[Tensor]:
    """Four blocks of five tokens, five keys that all blocks see, their values, and a padding mask."""
    keep = torch.ones(s.batch, 20)
    keep[0, 17:] = 0
    return [*(rand(s.batch, s.heads, 20, s.dim) for _ in range(3)), rand(s.batch, s.heads, 5, s.dim),
            rand(s.batch, s.heads, 5, s.dim), keep]  # fmt: skip


@form(_blocks, mask="operand")
def tokens_of_a_block_and_global_ones(q: Tensor, k: Tensor, v: Tensor, far: Tensor, far_v: Tensor, keep: Tensor):
    b, h, n, d = q.shape
    q, k, v = (t.view(b, h, n // 5, 5, d) for t in (q * d**-0.5, k, v))
    hidden = F.pad((1.0 - keep.to(q.dtype)).view(b, n // 5, 5) * -1e4, (5, 0))
    scores = [torch.einsum("bhnqd,bhkd->bhnqk", q, far), torch.einsum("bhnqd,bhnkd->bhnqk", q, k)]
    weights = F.softmax(torch.cat(scores, dim=-1) + hidden[:, None, :, None, :], dim=-1)
    out = torch.einsum("bhnqk,bhkd->bhnqd", weights[..., :5], far_v)
    return (out + torch.einsum("bhnqk,bhnkd->bhnqd", weights[..., 5:], v)).reshape(b, h, n, d)


@form(lambda s: [*heads_first(s), *heads_first(s)[1:], *heads_first(s)[1:]])
def three_kinds_of_keys(q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor, k3: Tensor, v3: Tensor) -> Tensor:
    """The products are added up in another order than their keys have; those of an image come column by column."""
    k3, v3 = (t.unflatten(2, (4, 5)).transpose(2, 3).flatten(2, 3) for t in (k3, v3))
    scores = torch.cat([q @ k.mT * 0.25, 0.25 * (q @ k2.mT), q @ k3.mT * 0.25], dim=-1)
    first, second, third = scores.softmax(-1).chunk(3, dim=-1)
    mixed = [torch.einsum("bhqk,bhkd->bqhd", w, x) for w, x in ((second, v2), (third, v3), (first, v))]
    return mixed[0] + (mixed[1] + mixed[2])


@form()
def values_of_the_first_keys_and_of_the_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax((q @ k.mT * 0.25).float(), dim=-1)
    return weights[..., :7].to(v.dtype) @ v[:, :, :7] + weights[..., 7:].to(v.dtype) @ v[:, :, 7:]
