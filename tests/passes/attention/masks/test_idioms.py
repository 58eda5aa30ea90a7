"""Masks as people write them, each proved to be what it is, with static and with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from optpass.passes.attention.masks import MaskFacts, Prover

INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
BATCH, LENGTH, PAST = 2, 9, 4
NAMES = ("b", "h", "q", "k")


@dataclass
class Idiom:
    """A mask of T queries and T keys (`past`: PAST more), and what is to be proved of it."""

    function: Callable[..., torch.Tensor]
    kind: str
    keep: bool = True
    fill: float | None = None
    never_empty: bool = True
    window: tuple[int, int] | None = None
    past: bool = False
    parts: tuple[str, ...] = ()
    buffer: bool = False


IDIOMS: dict[str, Idiom] = {}


def proves(kind: str, **facts: Any) -> Callable[[Any], Any]:
    """Registers a mask: a function of x (B, T, 4), the past x (B, T + PAST, 4), and buffers by name."""

    def register(function: Any) -> Any:
        IDIOMS[function.__name__] = Idiom(function, kind, **facts)
        return function

    return register


def steps(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.arange(x.shape[1], **kwargs)


def square(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], **kwargs)


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


# ---- the tests ------------------------------------------------------------------------------------------------------


class Masks(torch.nn.Module):
    """All idioms, and the buffers that some of them read."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.ones(1, 1, 32, 32, dtype=torch.bool)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        self.register_buffer("infinite", torch.full((32, 32), INF).triu(1))
        self.register_buffer("places", torch.arange(32).expand(1, -1))
        self.register_buffer("window", ones.tril() ^ ones.tril(-4))

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> list[torch.Tensor]:
        held = {"tril": self.tril, "infinite": self.infinite, "places": self.places, "window": self.window}
        return [idiom.function(x, past, held) for idiom in IDIOMS.values()]


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def graph(request: Any, lowered: Any) -> Any:
    """All idioms in one graph, its prover, and the masks themselves."""
    x, past, masks = torch.randn(BATCH, LENGTH, 4) * 3, torch.randn(BATCH, LENGTH + PAST, 4), Masks()
    found = lowered(masks, x, past, dynamic=request.param)
    held = {id(buffer) for buffer in masks.buffers()}
    prover = Prover(lambda value: data if id(data := found.contents(value)) in held else None)
    return found, prover, dict(zip(IDIOMS, masks(x, past), strict=True))


def facts(graph: Any, name: str) -> MaskFacts:
    found, prover, _ = graph
    value = found.outputs[list(IDIOMS).index(name)]
    return prover.prove(value, NAMES[-value.dim :], *value.shape[-2:], keep_when=IDIOMS[name].keep)


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_is_proved(graph: Any, name: str, concrete: Any) -> None:
    found, idiom = facts(graph, name), IDIOMS[name]
    assert found.kind == idiom.kind, found
    assert found.fill == idiom.fill
    assert found.finite == (idiom.fill != INF)
    assert found.row_never_empty == idiom.never_empty
    assert bool(found.buffers) == idiom.buffer
    assert found.words
    if idiom.window:
        assert (found.left, found.right) == idiom.window
    if idiom.parts:
        assert sorted(part.kind for part in found.parts) == sorted(idiom.parts)


@pytest.mark.parametrize("name", IDIOMS)
def test_predicate_is_what_the_mask_keeps(graph: Any, name: str, concrete: Any) -> None:
    low, _, masks = graph
    value, mask = low.outputs[list(IDIOMS).index(name)], masks[name]
    kept = mask == IDIOMS[name].keep if mask.dtype == torch.bool else mask == 0
    predicate = concrete(facts(graph, name).predicate, value, NAMES[-value.dim :], low)
    assert (predicate == kept.numpy()).all()
