"""Masks from buffers and with offsets, windows, padding, documents, blocks and prefixes."""

from __future__ import annotations

import torch
from attention_mask_idioms.base import INF, LOWEST, proves, square, steps

# ---- causal: buffers and offsets ------------------------------------------------------------------------------------


@proves("causal", buffer=True)
def buffer_sliced(x, past, buffers):
    return buffers["tril"][:, :, : x.shape[1], : x.shape[1]] != 0


@proves("causal", buffer=True, fill=INF)
def buffer_of_infinities(x, past, buffers):
    return buffers["infinite"][: x.shape[1], : x.shape[1]]


@proves("causal", buffer=True)
def buffer_of_places(x, past, buffers):
    place = buffers["places"][0, : x.shape[1]]
    return place[:, None] >= place


@proves("causal_offset", past=True, buffer=True)
def buffer_sliced_from_the_end(x, past, buffers):
    t, s = x.shape[1], past.shape[1]
    return buffers["tril"][:, :, s - t : s, :s] == 1


@proves("causal_offset", past=True)
def queries_after_the_past(x, past, buffers):
    t, s = x.shape[1], past.shape[1]
    return torch.arange(s)[None] <= torch.arange(s - t, s)[:, None]


@proves("causal_offset", past=True)
def triangle_with_offset(x, past, buffers):
    t, s = x.shape[1], past.shape[1]
    return torch.ones(t, s, dtype=torch.bool).tril(diagonal=s - t)


@proves("causal", past=True)
def triangle_of_the_first_keys(x, past, buffers):
    return torch.ones(x.shape[1], past.shape[1]).tril().bool()


# ---- windows --------------------------------------------------------------------------------------------------------


@proves("window", window=(3, 0))
def window_of_distances(x, past, buffers):
    distance = steps(x)[:, None] - steps(x)[None]
    return (distance >= 0) & (distance < 4)


@proves("window", window=(3, 0))
def window_by_exclusive_or(x, past, buffers):
    ones = square(x, dtype=torch.bool)
    return torch.tril(ones) ^ torch.tril(ones, -4)


@proves("window", window=(3, 0))
def window_of_two_triangles(x, past, buffers):
    return torch.triu(torch.tril(square(x)), -3) == 1


@proves("window", window=(3, 3))
def window_to_both_sides(x, past, buffers):
    return (steps(x)[:, None] - steps(x)[None]).abs() <= 3


@proves("window", window=(3, 0), fill=INF)
def logarithm_of_window(x, past, buffers):
    return torch.log(torch.triu(torch.tril(square(x), 0), -3))


@proves("window", window=(3, 0), buffer=True)
def window_buffer(x, past, buffers):
    return buffers["window"][:, :, : x.shape[1], : x.shape[1]]


@proves("window", window=(2, 1))
def window_by_subtraction(x, past, buffers):
    ones = square(x, dtype=torch.int32)
    return (ones.tril(1) - ones.tril(-3)) > 0


# ---- padding, documents, blocks, prefixes ---------------------------------------------------------------------------


@proves("padding", never_empty=False)
def padding_of_keys(x, past, buffers):
    return (x[:, :, 0] > 0)[:, None, None, :]


@proves("padding", keep=False, never_empty=False)
def padding_inverted(x, past, buffers):
    return ~(x[:, :, 0] > 0)[:, None, None, :]


@proves("padding", never_empty=False)
def lengths_of_keys(x, past, buffers):
    return (steps(x)[None] < x[:, 0, 0].long()[:, None])[:, None, None]


@proves("padding", never_empty=False, fill=LOWEST)
def padding_additive(x, past, buffers):
    return torch.where(x[:, None, None, :, 0] > 0, 0.0, torch.finfo(torch.float32).min)


@proves("compound", parts=("causal", "padding"), never_empty=False)
def causal_and_padding(x, past, buffers):
    return torch.tril(square(x, dtype=torch.bool))[None, None] & (x[:, :, 0] > 0)[:, None, None]


@proves("compound", parts=("causal", "padding"), never_empty=False, fill=INF)
def causal_and_padding_added(x, past, buffers):
    causal = torch.full((x.shape[1], x.shape[1]), INF).triu(1)
    return causal[None, None] + torch.where(x[:, None, None, :, 0] > 0, 0.0, INF)


@proves("compound", parts=("causal", "padding"), never_empty=False)
def causal_and_padding_by_index(x, past, buffers):
    b, q, k = torch.arange(x.shape[0])[:, None, None, None], steps(x)[:, None], steps(x)
    return (k <= q) & (x[:, :, 0] > 0)[b, k]


@proves("document")
def same_document(x, past, buffers):
    document = x[:, :, 0].long()
    return (document[:, :, None] == document[:, None, :])[:, None]


@proves("compound", parts=("causal", "document"))
def causal_in_document(x, past, buffers):
    document = x[:, :, 0].long()
    return (document[:, :, None] == document[:, None, :]) & (steps(x)[:, None] >= steps(x))


@proves("causal")
def no_new_document(x, past, buffers):
    place = steps(x)[None]
    jump = torch.diff(place, prepend=place[:, :1] - 1, dim=-1)
    document = (jump != 1).cumsum(-1)
    return (document[:, :, None] == document[:, None, :]) & (steps(x)[:, None] >= steps(x))


@proves("block")
def same_block(x, past, buffers):
    block = steps(x) // 4
    return block[:, None] == block


@proves("compound", parts=("block", "causal"))
def causal_in_block(x, past, buffers):
    block = torch.div(steps(x), 4, rounding_mode="floor")
    return (block[:, None] == block) & torch.tril(square(x, dtype=torch.bool))


@proves("prefix_causal")
def prefix_seen_by_all(x, past, buffers):
    return (steps(x)[None] <= steps(x)[:, None]) | (steps(x)[None] < 3)


@proves("prefix")
def first_keys_only(x, past, buffers):
    return (steps(x) < 5)[None, :].expand(x.shape[1], -1)


@proves("queries", never_empty=False)
def padding_of_queries(x, past, buffers):
    return (x[:, :, 0] > 0)[:, None, :, None]


@proves("all")
def zeros_added(x, past, buffers):
    return torch.zeros(x.shape[1], x.shape[1])


@proves("all")
def always_true(x, past, buffers):
    return (steps(x)[:, None] >= 0) | (steps(x)[None] < 0)


@proves("none", never_empty=False, fill=LOWEST)
def nothing_kept(x, past, buffers):
    return torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min)
