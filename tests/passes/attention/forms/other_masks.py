"""Masks that are not causal, or not only: padding, windows, documents, prefixes. They go to the kernel as operands."""

from __future__ import annotations

from typing import Any

import torch
from attention_forms.base import Sizes, crossed, heads_first, keep
from attention_forms.mask_base import Masked, buffer_idiom, idiom
from torch import Tensor

INF = float("-inf")


def _with_keep(s: Sizes) -> list[Any]:
    return [*heads_first(s), keep(s)]


def _with_documents(s: Sizes) -> list[Any]:
    return [*heads_first(s), torch.randint(0, 2, (s.batch, s.length)).cumsum(1) // 3]


def _with_prefix(s: Sizes) -> list[Any]:
    return [*heads_first(s), torch.randint(1, s.length, (s.batch,))]


def _with_float(s: Sizes) -> list[Any]:
    return [*heads_first(s), torch.randn(s.batch, 1, s.length, s.length)]


@idiom("operand", _with_keep)
def padding_as_a_fill(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(~keep[:, None, None, :], INF)


@idiom("operand", _with_keep)
def padding_as_integers(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(keep.long()[:, None, None, :] == 0, torch.finfo(scores.dtype).min)


@idiom("operand", _with_keep)
def padding_as_a_sum(scores: Tensor, keep: Tensor) -> Tensor:
    return scores + (1.0 - keep[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min


@idiom("operand", _with_keep)
def padding_expanded(scores: Tensor, keep: Tensor) -> Tensor:
    inverted = 1.0 - keep[:, None, None, :].expand(-1, 1, scores.shape[-2], -1).to(scores.dtype)
    return scores + inverted.masked_fill(inverted.bool(), torch.finfo(scores.dtype).min)


@idiom("operand", _with_keep)
def padding_by_where(scores: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep[:, None, None], scores, scores.new_full((), INF))


@idiom("operand", heads_first)
def the_last_keys_by_a_slice(scores: Tensor) -> Tensor:
    scores = scores + 0.0
    scores[..., -5:] = INF
    return scores


@idiom("operand", heads_first)
def a_corner_by_a_slice(scores: Tensor) -> Tensor:
    """Cross attention of text to the first image alone."""
    scores = scores + 0.0
    scores[:, :, :7, 9:] = -1e9
    return scores


@idiom("operand", _with_keep)
def keys_by_a_mask_behind_an_ellipsis(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores + 0.0
    scores[..., ~keep[0]] = INF
    return scores


@idiom("operand", heads_first)
def queries_and_keys_by_a_mask(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    scores = scores + 0.0
    scores[:, :, (i[:, None] - i).abs() > 4] = INF
    return scores


@idiom("operand", _with_keep)
def filled_by_another_shape(scores: Tensor, keep: Tensor) -> Tensor:
    """fairseq: batch and heads are one dim, and two again for the mask."""
    folded = (scores + 0.0).flatten(0, 1)
    folded.view(scores.shape).masked_fill_(~keep[:, None, None, :], INF)
    return folded.view(scores.shape)


@idiom("operand", _with_keep)
def causal_and_padding_together(scores: Tensor, keep: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(~((i[None, :] <= i[:, None]) & keep[:, None, None, :]), INF)


@idiom("operand", _with_keep)
def causal_and_padding_added(scores: Tensor, keep: Tensor) -> Tensor:
    """Two masks of finfo.min summed, then clamped, as in several decoders."""
    n, minimum = scores.shape[-1], torch.finfo(scores.dtype).min
    causal = torch.full((n, n), minimum, dtype=scores.dtype).triu(1)[None, None]
    padding = torch.zeros_like(keep, dtype=scores.dtype).masked_fill(~keep, minimum)[:, None, None, :]
    return scores + torch.max(causal + padding, torch.tensor(minimum, dtype=scores.dtype))


@idiom("operand", _with_keep)
def causal_with_padding_written_in(scores: Tensor, keep: Tensor) -> Tensor:
    """The 4-D mask with a cache position: padding is written where the causal mask is 0."""
    n, minimum = scores.shape[-1], torch.finfo(scores.dtype).min
    mask = torch.full((n, n), minimum, dtype=scores.dtype).triu(1)[None, None].expand(scores.shape[0], 1, -1, -1)
    mask = mask.clone()
    padding = mask[:, :, :, :n] + keep[:, None, None, :].to(scores.dtype)
    mask[:, :, :, :n] = mask[:, :, :, :n].masked_fill(padding == 0, minimum)
    return scores + mask


@idiom("operand", _with_keep)
def lengths_compared(scores: Tensor, keep: Tensor) -> Tensor:
    lengths = keep.sum(dim=1)
    return scores.masked_fill(torch.arange(scores.shape[-1]) >= lengths[:, None, None, None], INF)


@idiom("operand")
def window_by_distance(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    distance = i[:, None] - i[None, :]
    return scores.masked_fill((distance < 0) | (distance >= 4), INF)


@idiom("operand")
def window_on_both_sides(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill((i[:, None] - i[None, :]).abs() > 3, INF)


@idiom("operand")
def window_by_two_triangles(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    ones = torch.ones(n, n, dtype=torch.bool)
    return scores.masked_fill(~ones.tril() | ones.tril(-5), torch.finfo(scores.dtype).min)


@idiom("operand")
def window_added_to_causal(scores: Tensor) -> Tensor:
    """Gemma 2: the causal mask, then finfo.min where the window has passed."""
    n, minimum = scores.shape[-1], torch.finfo(scores.dtype).min
    causal = torch.full((n, n), minimum, dtype=scores.dtype).triu(1)
    passed = torch.tril(torch.ones_like(causal, dtype=torch.bool), diagonal=-6)
    return scores + torch.where(passed, minimum, causal)


@idiom("operand", _with_documents)
def documents(scores: Tensor, ids: Tensor) -> Tensor:
    return scores.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], INF)


@idiom("operand", _with_documents)
def documents_and_causal(scores: Tensor, ids: Tensor) -> Tensor:
    n = scores.shape[-1]
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    allowed = same & torch.ones(n, n, dtype=torch.bool).tril()
    return torch.where(allowed.unsqueeze(1), scores, torch.finfo(scores.dtype).min)


@idiom("operand", _with_prefix)
def prefix_per_sequence(scores: Tensor, prefix: Tensor) -> Tensor:
    """Everyone sees the prefix, the rest is causal."""
    i = torch.arange(scores.shape[-1])
    allowed = (i[None, :] <= i[:, None]) | (i[None, :] < prefix[:, None, None])
    return scores.masked_fill(~allowed[:, None], INF)


@idiom("operand")
def prefix_of_four(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    allowed = torch.tril(torch.ones(n, n, dtype=torch.bool))
    allowed[:, :4] = True
    return scores.masked_fill(~allowed, INF)


@idiom("operand")
def strided(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    distance = i[:, None] - i[None, :]
    return scores.masked_fill(~((distance >= 0) & (distance % 3 == 0)), INF)


@idiom("operand")
def not_to_itself(scores: Tensor) -> Tensor:
    """Reformer, and LSA for small images: the diagonal is masked."""
    return scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), INF)


@idiom("operand", _with_float)
def any_numbers(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask


@idiom("operand", _with_float)
def any_numbers_and_causal(scores: Tensor, mask: Tensor) -> Tensor:
    n = scores.shape[-1]
    return (scores + mask).masked_fill(torch.ones(n, n).tril() == 0, INF)


@idiom("operand", crossed)
def every_second_key(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 1, INF)


@idiom("operand")
def global_tokens(scores: Tensor) -> Tensor:
    """Longformer: a window, and two tokens that see and are seen by all."""
    i = torch.arange(scores.shape[-1])
    row, column = i[:, None], i[None, :]
    allowed = ((row - column).abs() <= 2) | (row < 2) | (column < 2)
    return scores.masked_fill(~allowed, -torch.inf)


@idiom("none")
def nothing_masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.zeros(scores.shape[-1], dtype=torch.bool), INF)


@idiom("none")
def zeros_added(scores: Tensor) -> Tensor:
    return scores + torch.zeros(scores.shape[-2], scores.shape[-1], dtype=scores.dtype)


@buffer_idiom("operand")
class WindowBuffer(Masked):
    def made(self, size: int) -> Tensor:
        ones = torch.ones(size, size)
        return torch.triu(torch.tril(ones), -3)

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[:n, :n] == 0, INF)


@buffer_idiom("operand")
class LocalOrGlobal(Masked):
    """GPT-Neo: tril xor tril(-window), bool."""

    def made(self, size: int) -> Tensor:
        bias = torch.tril(torch.ones((size, size), dtype=torch.bool)).view(1, 1, size, size)
        return torch.bitwise_xor(bias, torch.tril(bias, -7))

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        minimum = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
        return torch.where(self.bias[:, :, m - n : m, :m], scores, minimum)


@buffer_idiom("operand")
class SummaryTokens(Masked):
    """A fixed layout of blocks, drawn at random once."""

    def made(self, size: int) -> Tensor:
        return (torch.rand(size, size) < 0.5) | torch.eye(size, dtype=torch.bool)

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores + torch.zeros_like(scores[0, 0]).masked_fill(~self.bias[:n, :n], INF)
