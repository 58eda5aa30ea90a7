"""Causal masks: triangles, comparisons of indices, and masks that are added."""

from __future__ import annotations

import torch
from attention_mask_idioms.base import INF, LOWEST, proves, square, steps
from torch.nn import functional as F

# ---- causal: triangles ----------------------------------------------------------------------------------------------


@proves("causal")
def tril_not_zero(x, past, buffers):
    return torch.tril(square(x)) != 0


@proves("causal")
def tril_viewed(x, past, buffers):
    return square(x).tril().view(1, 1, x.shape[1], x.shape[1]) == 1


@proves("causal", keep=False)
def tril_equals_zero(x, past, buffers):
    return square(x).tril()[None, None] == 0


@proves("causal")
def not_triu_of_one(x, past, buffers):
    return ~torch.triu(square(x, dtype=torch.bool), diagonal=1)


@proves("causal", keep=False)
def triu_in_place(x, past, buffers):
    return square(x, dtype=torch.uint8).triu_(1).bool()


@proves("causal", keep=False)
def one_minus_tril(x, past, buffers):
    return (1 - torch.tril(square(x))).bool()


@proves("causal")
def tril_repeated(x, past, buffers):
    return torch.tril(square(x)).repeat(x.shape[0], 2, 1, 1).bool()


@proves("causal")
def triangle_transposed(x, past, buffers):
    return torch.triu(square(x, dtype=torch.bool)).t()


@proves("causal")
def tril_logical_and_itself(x, past, buffers):
    return torch.tril(square(x)).logical_and(square(x).tril().transpose(0, 1).mT)


@proves("causal")
def padded_smaller_triangle(x, past, buffers):
    inner = square(x[:, 1:], dtype=torch.bool).tril()
    return F.pad(inner, (0, 1, 1, 0)) | torch.eye(x.shape[1], dtype=torch.bool)


@proves("causal")
def triangle_by_advanced_index(x, past, buffers):
    return square(x, dtype=torch.bool).tril()[steps(x)][:, steps(x)]


@proves("causal")
def triangle_flipped_twice(x, past, buffers):
    return square(x).triu().flip(0, 1).bool()


@proves("causal")
def new_tensor_triangle(x, past, buffers):
    return x.new_ones(x.shape[1], x.shape[1]).tril(diagonal=0).to(torch.bool)


@proves("causal")
def zeros_filled(x, past, buffers):
    return torch.zeros_like(square(x)).fill_(2.0).tril() > 1


# ---- causal: comparisons of indices ---------------------------------------------------------------------------------


@proves("causal")
def arange_compared(x, past, buffers):
    return steps(x)[:, None] >= steps(x)[None, :]


@proves("causal")
def arange_less_than_next(x, past, buffers):
    return steps(x)[None] < steps(x).view(-1, 1) + 1


@proves("causal", keep=False)
def arange_greater(x, past, buffers):
    return torch.gt(steps(x).unsqueeze(0), steps(x).unsqueeze(1))


@proves("causal")
def distance_not_negative(x, past, buffers):
    return (steps(x).view(-1, 1) - steps(x).view(1, -1)) >= 0


@proves("causal")
def distance_scaled(x, past, buffers):
    return 2 * steps(x)[:, None] + 1 > 2 * steps(x)[None]


@proves("causal")
def counted_by_cumsum(x, past, buffers):
    ones = square(x, dtype=torch.long)
    return ones.cumsum(0) >= ones.cumsum(1)


@proves("causal")
def expanded_and_transposed(x, past, buffers):
    rows = steps(x).reshape(-1, 1).expand(x.shape[1], x.shape[1])
    return rows >= rows.t()


@proves("causal")
def distance_clamped(x, past, buffers):
    return torch.clamp(steps(x)[None] - steps(x)[:, None], min=0) == 0


@proves("causal")
def maximum_of_both(x, past, buffers):
    return torch.maximum(steps(x)[None], steps(x)[:, None]) == steps(x)[:, None]


@proves("causal")
def short_integers(x, past, buffers):
    return steps(x, dtype=torch.int32)[:, None] >= steps(x, dtype=torch.int32)


@proves("causal")
def joined_ranges(x, past, buffers):
    places = torch.cat([torch.arange(2), torch.arange(2, x.shape[1])])
    return places[:, None] >= places


@proves("causal")
def vmapped(x, past, buffers):
    rows = torch.vmap(lambda q, k: k <= q, (None, 0))
    return torch.vmap(rows, (0, None))(steps(x), steps(x))


@proves("causal")
def four_dims_by_broadcast(x, past, buffers):
    q, k = steps(x)[None, None, :, None], steps(x)[None, None, None, :]
    keep = q.new_ones((), dtype=torch.bool)
    return (keep & (k <= q)).expand(x.shape[0], -1, -1, -1)


# ---- causal: additive -----------------------------------------------------------------------------------------------


@proves("causal", fill=INF)
def triu_of_infinities(x, past, buffers):
    return torch.triu(torch.full((x.shape[1], x.shape[1]), INF), diagonal=1)


@proves("causal", fill=INF)
def transformer_mask(x, past, buffers):
    return torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])


@proves("causal", fill=INF)
def where_triangle(x, past, buffers):
    return torch.where(torch.tril(square(x, dtype=torch.bool)), 0.0, INF)


@proves("causal", fill=INF)
def filled_twice(x, past, buffers):
    triangle = torch.tril(square(x))
    return triangle.masked_fill(triangle == 0, INF).masked_fill(triangle == 1, 0.0)


@proves("causal", fill=INF)
def logarithm_of_triangle(x, past, buffers):
    return torch.log(torch.tril(square(x)))


@proves("causal", fill=-10000.0)
def one_minus_times_large(x, past, buffers):
    return (1.0 - torch.tril(square(x))) * -10000.0


@proves("causal", fill=torch.finfo(torch.bfloat16).min)
def one_minus_times_minimum_in_bfloat16(x, past, buffers):
    return (1.0 - torch.tril(square(x, dtype=torch.bfloat16))) * torch.finfo(torch.bfloat16).min


@proves("causal", fill=INF)
def minimum_overflows_bfloat16(x, past, buffers):
    return torch.triu(torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min), 1).to(torch.bfloat16)


@proves("causal", fill=INF)
def billion_overflows_half(x, past, buffers):
    return torch.triu(torch.full((x.shape[1], x.shape[1]), -1e9), 1).half()


@proves("causal", fill=LOWEST)
def minimum_filled_in_place(x, past, buffers):
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min)
    place = torch.arange(mask.size(-1))
    mask.masked_fill_(place < (place + 1).view(mask.size(-1), 1), 0)
    return mask[None, None].expand(x.shape[0], 1, -1, -1)


@proves("causal", fill=LOWEST)
def minimum_times_comparison(x, past, buffers):
    mask = torch.triu(torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min), diagonal=1)
    return mask * (steps(x) > steps(x).reshape(-1, 1))


@proves("causal", fill=LOWEST)
def where_of_tensors(x, past, buffers):
    zero, low = torch.tensor(0.0), torch.tensor(torch.finfo(torch.float32).min)
    return torch.where(steps(x)[None] <= steps(x)[:, None], zero, low)
