"""Masks that look causal and are not. `is_causal` on any of them is a wrong result."""

from __future__ import annotations

from typing import Any

import torch
from attention_forms.base import Sizes, crossed, heads_first
from attention_forms.mask_base import idiom
from torch import Tensor

INF = float("-inf")


def _almost(inputs: Any = heads_first) -> Any:
    return idiom("operand", inputs, target="either", train="either", group="almost")


def _more_queries(s: Sizes) -> list[Any]:
    return crossed(Sizes(length=s.keys, keys=s.length))


def _large(s: Sizes) -> list[Any]:
    """Scores in the tens of thousands."""
    q, k, v = heads_first(s)
    return [(q.detach() * 150).requires_grad_(), (k.detach() * 150).requires_grad_(), v]


def _with_positions(s: Sizes) -> list[Any]:
    return [*heads_first(s), torch.randperm(s.length)]


@_almost()
def one_element_more(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    tril = torch.tril(torch.ones(n, n))
    tril[3, 7] = 1
    return scores.masked_fill(tril == 0, INF)


@_almost()
def one_element_less(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    tril = torch.ones(n, n, dtype=torch.bool).tril()
    tril[-1, 0] = False
    return scores.masked_fill(~tril, INF)


@_almost()
def one_column_for_all(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    tril = torch.ones(n, n, dtype=torch.bool).tril()
    tril[:, 5] = True
    return scores.masked_fill(~tril, INF)


@_almost()
def tril_of_one(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n), diagonal=1) == 0, INF)


@_almost()
def tril_of_minus_one(scores: Tensor) -> Tensor:
    """The first row sees nothing: a finite fill makes it uniform."""
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n), diagonal=-1) == 0, torch.finfo(scores.dtype).min)


@_almost()
def strictly_less(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(~(i[None, :] < i[:, None]), torch.finfo(scores.dtype).min)


@_almost()
def off_by_one_in_the_comparison(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(i[None, :] > i[:, None] + 1, INF)


@_almost()
def off_by_one_in_the_arange(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.arange(n)[None, :] > torch.arange(1, n + 1)[:, None], INF)


@_almost()
def twice_as_steep(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(i[None, :] > 2 * i[:, None], INF)


@_almost()
def transposed(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n)).T == 0, INF)


@_almost()
def rows_and_columns_exchanged(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return torch.where(i[:, None] <= i[None, :], scores, INF)


@_almost()
def meshgrid_xy(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    row, column = torch.meshgrid(i, i, indexing="xy")
    return scores.masked_fill(column > row, INF)


@_almost()
def the_other_polarity(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).tril(), torch.finfo(scores.dtype).min)


@_almost()
def filled_with_zero(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, 0.0)


@_almost()
def filled_with_a_large_number(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, 1e3)


@_almost(_large)
def filled_with_a_number_that_scores_reach(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, -1e4)


@_almost(_large)
def added_a_number_that_scores_reach(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + (1.0 - torch.tril(torch.ones(n, n, dtype=scores.dtype))) * -1e4


@_almost()
def multiplied_instead_of_masked(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores * torch.tril(torch.ones(n, n, dtype=scores.dtype))


@_almost()
def scores_cut_by_tril(scores: Tensor) -> Tensor:
    """`tril` of the scores leaves zeros, which are scores like others."""
    return scores.tril()


@_almost()
def ones_added(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + torch.triu(torch.ones(n, n, dtype=scores.dtype), diagonal=1)


@_almost()
def flipped(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).tril().flip(0), -1e30)


@_almost()
def rolled(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.ones(n, n).tril().roll(1, dims=1) == 0, INF)


@_almost()
def for_some_heads(scores: Tensor) -> Tensor:
    h, n = scores.shape[1], scores.shape[-1]
    tril = torch.tril(torch.ones(n, n, dtype=torch.bool)).expand(h - 1, n, n)
    return scores.masked_fill(~torch.cat([tril, torch.ones(1, n, n, dtype=torch.bool)]), INF)


@_almost()
def for_one_sequence(scores: Tensor) -> Tensor:
    b, n = scores.shape[0], scores.shape[-1]
    first = (torch.arange(b) == 0)[:, None, None, None]
    return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1) & first, INF)


@_almost(crossed)
def counted_from_the_end(scores: Tensor) -> Tensor:
    """More keys than queries: the diagonal ends in the last column."""
    n, m = scores.shape[-2:]
    return scores.masked_fill(torch.ones(n, m).tril(m - n) == 0, INF)


@_almost(crossed)
def positions_after_a_cache(scores: Tensor) -> Tensor:
    n, m = scores.shape[-2:]
    query, key = torch.arange(m - n, m), torch.arange(m)
    return scores.masked_fill(key[None, :] > query[:, None], INF)


@_almost(_more_queries)
def fewer_keys_counted_from_the_end(scores: Tensor) -> Tensor:
    """Fewer keys than queries: the first rows see nothing, and are uniform by the finite fill."""
    n, m = scores.shape[-2:]
    return scores.masked_fill(torch.ones(n, m).tril(m - n) == 0, torch.finfo(scores.dtype).min)


@_almost(_with_positions)
def positions_from_the_caller(scores: Tensor, positions: Tensor) -> Tensor:
    """Causal if the caller counts upwards, which nobody knows."""
    return scores.masked_fill(positions[None, :] > positions[:, None], INF)


@_almost()
def in_chunks(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1]) // 4
    return scores.masked_fill(i[None, :] > i[:, None], INF)


@_almost()
def of_a_power(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(i[None, :] > (i * i)[:, None], INF)
