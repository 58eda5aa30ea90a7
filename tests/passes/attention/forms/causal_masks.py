"""Spellings of a causal mask. All of them are `key <= query`, and nothing else is masked."""

from __future__ import annotations

import numpy as np
import torch
from attention_forms.mask_base import idiom
from torch import Tensor, nn

INF = float("-inf")


@idiom("causal")
def tril_equals_zero(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, INF)


@idiom("causal")
def tril_bool_negated(scores: Tensor) -> Tensor:
    n = scores.size(-1)
    return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), torch.finfo(scores.dtype).min)


@idiom("causal")
def triu_of_one(scores: Tensor) -> Tensor:
    n = scores.shape[-2]
    return scores.masked_fill(torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1), INF)


@idiom("causal")
def triu_equals_one(scores: Tensor) -> Tensor:
    n = scores.shape[-2]
    return scores.masked_fill(torch.triu(torch.ones((n, n)), diagonal=1) == 1, INF)


@idiom("causal")
def triu_in_bytes(scores: Tensor) -> Tensor:
    n = scores.shape[-2]
    blocked = torch.triu(torch.ones(n, n, dtype=torch.uint8), diagonal=1)
    return scores.masked_fill(blocked.bool(), INF)


@idiom("causal")
def triu_of_integers(scores: Tensor) -> Tensor:
    """The annotated transformer: subsequent_mask(size) == 0, then mask == 0 once more."""
    n = scores.shape[-2]
    subsequent = torch.triu(torch.ones((1, n, n)), diagonal=1).type(torch.uint8)
    return scores.masked_fill((subsequent == 0) == 0, INF)


@idiom("causal")
def minus_infinity_triu_added(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + torch.full((n, n), INF, dtype=scores.dtype).triu(diagonal=1)


@idiom("causal")
def minimum_triu_added(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    mask = torch.triu(torch.full((n, n), torch.finfo(scores.dtype).min, dtype=scores.dtype), diagonal=1)
    return scores + mask[None, None, :, :]


@idiom("causal")
def ones_times_minus_infinity_triu(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + torch.triu(torch.ones(n, n, dtype=scores.dtype) * INF, diagonal=1)


@idiom("causal")
def zeros_filled_and_added(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    mask = torch.zeros(n, n, dtype=scores.dtype)
    mask = mask.masked_fill(torch.ones(n, n, dtype=torch.bool).tril().logical_not(), INF)
    return scores + mask


@idiom("causal")
def zeros_filled_in_place_and_added(scores: Tensor) -> Tensor:
    """The reference in the documentation of scaled_dot_product_attention."""
    n = scores.shape[-1]
    attn_bias = torch.zeros(n, n, dtype=scores.dtype)
    temp_mask = torch.ones(n, n, dtype=torch.bool).tril(diagonal=0)
    attn_bias.masked_fill_(temp_mask.logical_not(), float("-inf"))
    scores += attn_bias
    return scores


@idiom("causal")
def positions_of_a_row_compared(scores: Tensor) -> Tensor:
    """`_make_causal_mask` of Bart and the first Llama."""
    n = scores.shape[-1]
    mask = torch.full((n, n), torch.finfo(scores.dtype).min)
    mask_cond = torch.arange(mask.size(-1))
    mask.masked_fill_(mask_cond < (mask_cond + 1).view(mask.size(-1), 1), 0)
    mask = mask.to(scores.dtype)
    return scores + mask[None, None, :, :].expand(scores.shape[0], 1, n, n)


@idiom("causal")
def minimum_times_positions(scores: Tensor) -> Tensor:
    """The 4-D mask with a cache position: finfo.min above the diagonal, then times `key > query`."""
    n = scores.shape[-1]
    cache_position = torch.arange(n)
    mask = torch.full((n, n), fill_value=torch.finfo(scores.dtype).min, dtype=scores.dtype)
    mask = torch.triu(mask, diagonal=1)
    mask *= torch.arange(n) > cache_position.reshape(-1, 1)
    return scores + mask[None, None, :, :].expand(scores.shape[0], 1, -1, -1)


@idiom("causal")
def arange_at_most(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return torch.where(i[None, :] <= i[:, None], scores, INF)


@idiom("causal")
def arange_greater(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-2], device=scores.device).unsqueeze(-1)
    j = torch.arange(scores.shape[-1], device=scores.device).unsqueeze(0)
    return scores.masked_fill(j > i, INF)


@idiom("causal")
def arange_in_four_dimensions(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-2]).view(1, 1, -1, 1)
    j = torch.arange(scores.shape[-1]).view(1, 1, 1, -1)
    return scores.masked_fill(torch.lt(i, j), INF)


@idiom("causal")
def arange_difference(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    distance = i[:, None] - i[None, :]
    return scores.masked_fill(distance < 0, INF)


@idiom("causal")
def arange_less_than_the_next(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(~(i[None, :] < i[:, None] + 1), INF)


@idiom("causal")
def meshgrid(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    row, column = torch.meshgrid(i, i, indexing="ij")
    return scores.masked_fill(column.gt(row), INF)


@idiom("causal")
def where_tril_else_a_tensor(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    tril = torch.ones((n, n), dtype=torch.bool).tril().view(1, 1, n, n)
    return torch.where(tril, scores, torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype))


@idiom("causal")
def where_triu_then_a_fill(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return torch.where(torch.ones(n, n).triu(1).bool(), torch.full_like(scores, INF), scores)


@idiom("causal")
def like_the_scores(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), INF)


@idiom("causal")
def new_ones(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(scores.new_ones((n, n)).tril_() == 0, INF)


@idiom("causal")
def one_minus_tril_times_minimum(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + (1.0 - torch.tril(torch.ones(n, n, dtype=scores.dtype))) * torch.finfo(scores.dtype).min


@idiom("causal")
def logarithm_of_tril(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + torch.ones(n, n, dtype=scores.dtype).tril().log()


@idiom("causal")
def expanded_over_the_batch(scores: Tensor) -> Tensor:
    b, h, n, m = scores.shape
    mask = torch.tril(torch.ones((n, m), dtype=torch.bool))[None, None].expand(b, h, n, m)
    return scores.masked_fill(~mask, INF)


@idiom("causal")
def repeated_over_the_batch(scores: Tensor) -> Tensor:
    b, _, n, m = scores.shape
    mask = torch.tril(torch.ones((n, m), dtype=torch.bool)).unsqueeze(0).repeat(b, 1, 1)
    return scores.masked_fill(~mask[:, None], INF)


@idiom("causal")
def filled_twice(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(n, n).triu(1) > 0, INF)
    return scores.masked_fill(torch.ones(n, n).tril() < 0.5, INF)


@idiom("causal")
def and_with_everything(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    allowed = torch.ones_like(scores[:1, :1], dtype=torch.bool) & (i[:, None] >= i[None, :])
    return scores.masked_fill(allowed == False, INF)  # noqa: E712


@idiom("causal")
def torchs_own_generator(scores: Tensor) -> Tensor:
    return scores + nn.Transformer.generate_square_subsequent_mask(scores.shape[-1], dtype=scores.dtype)


@idiom("causal")
def float32_mask_cast(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + torch.triu(torch.full((n, n), INF), 1).to(scores)


@idiom("free")
def tril_from_numpy(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    subsequent = np.triu(np.ones((1, 64, 64)), k=1).astype("uint8")
    return scores.masked_fill(torch.from_numpy(subsequent)[:, :n, :n] == 1, INF)


@idiom("free")
def cumulated_identity(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.eye(n).cumsum(dim=0) == 0, INF)


@idiom("free")
def minus_a_billion(scores: Tensor) -> Tensor:
    """A number: the mask is causal only where no score is as low."""
    n = scores.shape[-1]
    return scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, -1e9)


@idiom("free")
def one_minus_tril_times_minus_a_billion(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return scores + (1.0 - torch.tril(torch.ones(n, n, dtype=scores.dtype))) * -1e9
