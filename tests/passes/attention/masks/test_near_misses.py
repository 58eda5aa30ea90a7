"""Masks that are almost something: none is proved to be it, and what is proved of them is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from optpass.passes.attention.masks import MaskFacts, Prover

INF = float("-inf")
NAMES = ("b", "h", "q", "k")
LENGTH, PAST = 8, 3

#: Each mask with the kinds that it must not be taken for, and the value that keeps a score.
MISSES: dict[str, tuple[Callable[..., torch.Tensor], frozenset[str], bool]] = {}


def not_proved(*kinds: str, keep: bool = True) -> Callable[[Any], Any]:
    """Registers a mask: a function of x (B, T, 4), the longer past, and buffers by name."""

    def register(function: Any) -> Any:
        MISSES[function.__name__] = (function, frozenset(kinds or ("causal",)) | {"all", "none"}, keep)
        return function

    return register


def steps(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.arange(x.shape[1], **kwargs)


def square(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], **kwargs)


# ---- by one ---------------------------------------------------------------------------------------------------------


@not_proved()
def strictly_below(x, past, held):
    return steps(x)[None] < steps(x)[:, None]


@not_proved()
def one_above_the_diagonal(x, past, held):
    return square(x, dtype=torch.bool).tril(1)


@not_proved()
def one_below_the_diagonal(x, past, held):
    return square(x, dtype=torch.bool).tril(-1)


@not_proved(keep=False)
def triu_of_zero_dropped(x, past, held):
    return square(x, dtype=torch.bool).triu()


@not_proved()
def range_from_one(x, past, held):
    return torch.arange(1, x.shape[1] + 1)[:, None] >= steps(x)


@not_proved()
def keys_from_one(x, past, held):
    return steps(x)[:, None] >= torch.arange(1, x.shape[1] + 1)


@not_proved()
def distance_at_least_minus_one(x, past, held):
    return steps(x)[:, None] - steps(x) >= -1


@not_proved()
def every_other_key(x, past, held):
    return 2 * steps(x)[:, None] >= 3 * steps(x)


@not_proved()
def halves(x, past, held):
    return steps(x)[:, None] // 2 >= steps(x) // 2


@not_proved()
def doubled_step(x, past, held):
    return torch.arange(0, 2 * x.shape[1], 2)[:, None] >= steps(x)


@not_proved()
def cumsum_of_twos(x, past, held):
    return (2 * square(x, dtype=torch.long)).cumsum(0) >= square(x, dtype=torch.long).cumsum(1)


# ---- turned and swapped ---------------------------------------------------------------------------------------------


@not_proved()
def transposed(x, past, held):
    return square(x, dtype=torch.bool).tril().t()


@not_proved()
def sides_swapped(x, past, held):
    return steps(x)[None] >= steps(x)[:, None]


@not_proved()
def polarity_swapped(x, past, held):
    return ~square(x, dtype=torch.bool).tril()


@not_proved(keep=False)
def kept_where_dropped(x, past, held):
    return square(x) * square(x).tril() != 0


@not_proved()
def flipped_once(x, past, held):
    return square(x, dtype=torch.bool).tril().flip(1)


@not_proved()
def rolled(x, past, held):
    return square(x, dtype=torch.bool).tril().roll(1, 0)


@not_proved()
def rows_reversed(x, past, held):
    return (x.shape[1] - 1 - steps(x))[:, None] >= steps(x)


@not_proved()
def rows_modulo(x, past, held):
    return (steps(x) % 5)[:, None] >= steps(x)


# ---- offsets and slices that are not square -------------------------------------------------------------------------


@not_proved()
def rows_of_the_end(x, past, held):
    t, s = x.shape[1], past.shape[1]
    return held["tril"][:, :, s - t : s, :s] != 0


@not_proved()
def rows_from_the_second(x, past, held):
    return held["tril"][0, 0, 1 : x.shape[1] + 1, : x.shape[1]] != 0


@not_proved()
def columns_from_the_second(x, past, held):
    return held["tril"][0, 0, : x.shape[1], 1 : x.shape[1] + 1] != 0


@not_proved()
def last_rows(x, past, held):
    return held["tril"][0, 0, -8:, -9:-1] != 0


@not_proved()
def every_second_row(x, past, held):
    return held["tril"][0, 0, : 2 * x.shape[1] : 2, : x.shape[1]] != 0


@not_proved()
def shifted_by_the_past(x, past, held):
    return steps(past)[None] <= steps(x)[:, None] + (past.shape[1] - x.shape[1])


@not_proved()
def offset_from_data(x, past, held):
    return steps(x)[None] <= steps(x)[:, None] + x[0, 0, 0].long()


# ---- buffers that are not quite -------------------------------------------------------------------------------------


@not_proved()
def one_element_more(x, past, held):
    return held["one_more"][: x.shape[1], : x.shape[1]]


@not_proved()
def one_element_less(x, past, held):
    return held["one_less"][: x.shape[1], : x.shape[1]]


@not_proved()
def a_corner_of_the_slice(x, past, held):
    return held["corner"][: x.shape[1], : x.shape[1]]


@not_proved()
def random_buffer(x, past, held):
    return held["random"][: x.shape[1], : x.shape[1]]


@not_proved()
def places_with_a_swap(x, past, held):
    place = held["swapped"][: x.shape[1]]
    return place[:, None] >= steps(x)


@not_proved()
def fractions_in_the_triangle(x, past, held):
    return held["fractions"][: x.shape[1], : x.shape[1]] == 1


# ---- written to -----------------------------------------------------------------------------------------------------


@not_proved()
def written_through_a_view(x, past, held):
    mask = square(x, dtype=torch.bool).tril()
    mask[0, 1] = True
    return mask


@not_proved()
def row_cleared_through_a_view(x, past, held):
    mask = square(x, dtype=torch.bool).tril()
    mask[3].fill_(True)
    return mask


@not_proved()
def filled_through_a_transposed_view(x, past, held):
    mask = torch.zeros(x.shape[1], x.shape[1])
    mask.t().masked_fill_(square(x, dtype=torch.bool).triu(1), INF)
    return mask


@not_proved()
def diagonal_filled(x, past, held):
    mask = square(x, dtype=torch.bool).tril()
    mask.diagonal().zero_()
    return mask


@not_proved()
def alias_read_after_the_write(x, past, held):
    mask = square(x).tril()
    alias = mask.view(-1).view(x.shape[1], x.shape[1])
    mask.mul_(x[0, 0, 0])
    return alias != 0


# ---- values ---------------------------------------------------------------------------------------------------------


@not_proved()
def triangle_times_data(x, past, held):
    return square(x).tril() * x[0, :, :1] != 0


@not_proved()
def triangle_of_data(x, past, held):
    return (x[0] @ x[0].t()).tril() != 0


@not_proved()
def threshold_never_reached(x, past, held):
    return square(x).tril() > 0.5 + x[0, 0, 0]


@not_proved()
def either_of_two(x, past, held):
    return square(x, dtype=torch.bool).tril() | (x[0, :, 0] > 0)


@not_proved()
def exclusive_or_with_data(x, past, held):
    return square(x, dtype=torch.bool).tril() ^ (x[0, :, 0] > 0)


@not_proved()
def small_bytes_wrap(x, past, held):
    place = steps(x, dtype=torch.uint8)
    return (place[:, None] - place) < 250


@not_proved()
def unsigned_difference_above_three(x, past, held):
    place = steps(x, dtype=torch.uint8)
    return place[:, None] - place > 3


@not_proved()
def coarse_bfloat16_places(x, past, held):
    place = (steps(x) + 300).to(torch.bfloat16)
    return place[:, None] >= place


@not_proved()
def two_levels(x, past, held):
    lower = torch.where(square(x, dtype=torch.bool).tril(-2), -1.0, 0.0)
    return torch.where(square(x, dtype=torch.bool).tril(), lower, INF)


@not_proved("causal", "general")
def nan_on_the_diagonal(x, past, held):
    return torch.where(steps(x)[:, None] > steps(x), 0.0, (steps(x)[:, None] - steps(x)).float().sqrt() * INF)


@not_proved()
def one_kept_everywhere(x, past, held):
    return torch.where(square(x, dtype=torch.bool).tril(), 1.0, INF)


@not_proved("window")
def window_open_behind(x, past, held):
    return steps(x)[:, None] - steps(x) < 4


@not_proved("window", "causal")
def gap_in_the_window(x, past, held):
    distance = steps(x)[:, None] - steps(x)
    return (distance >= 0) & (distance != 2)


@not_proved("document")
def another_document_tensor(x, past, held):
    return (x[:, :, 0].long()[:, :, None] == x[:, :, 1].long()[:, None])[:, None]


@not_proved("document")
def document_of_the_next(x, past, held):
    one = past[:, :, 0].long()
    return (one[:, 1 : 1 + x.shape[1], None] == one[:, None, : x.shape[1]])[:, None]


@not_proved("document", "block")
def not_the_same_document(x, past, held):
    one = x[:, :, 0].long()
    return (one[:, :, None] != one[:, None])[:, None]


@not_proved("block")
def blocks_of_two_sizes(x, past, held):
    return (steps(x) // 4)[:, None] == steps(x) // 3


@not_proved("padding")
def padding_of_queries_and_keys(x, past, held):
    kept = x[:, :, 0] > 0
    return (kept[:, :, None] & kept[:, None, :])[:, None]


# ---- the tests ------------------------------------------------------------------------------------------------------


class Masks(torch.nn.Module):
    """All near misses, and the buffers that some of them read."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.ones(32, 32, dtype=torch.bool).tril()
        one_more, one_less, corner = whole.clone(), whole.clone(), whole.clone()
        one_more[3, 5], one_less[6, 2], corner[0, 7] = True, False, True
        swapped = torch.arange(32)
        swapped[[2, 3]] = swapped[[3, 2]]
        fractions = whole.float()
        fractions[4, 4] = 0.5
        held = {"tril": whole.float()[None, None], "one_more": one_more, "one_less": one_less, "corner": corner}
        held |= {"random": torch.rand(32, 32) > 0.5, "swapped": swapped, "fractions": fractions}
        self.names = list(held)
        for name, data in held.items():
            self.register_buffer(name, data)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> list[torch.Tensor]:
        held = {name: getattr(self, name) for name in self.names}
        return [function(x, past, held) for function, *_ in MISSES.values()]


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def graph(request: Any, lowered: Any) -> Any:
    """All masks in one graph, a prover that may read the buffers, and the masks themselves."""
    x, past, masks = torch.randn(2, LENGTH, 4) * 3, torch.randn(2, LENGTH + PAST, 4), Masks()
    found = lowered(masks, x, past, dynamic=request.param)
    held = {id(buffer) for buffer in masks.buffers()}
    prover = Prover(lambda value: data if id(data := found.contents(value)) in held else None)
    return found, prover, dict(zip(MISSES, masks(x, past), strict=True))


def facts(graph: Any, name: str) -> MaskFacts:
    found, prover, _ = graph
    value = found.outputs[list(MISSES).index(name)]
    return prover.prove(value, NAMES[-value.dim :], *value.shape[-2:], keep_when=MISSES[name][2])


@pytest.mark.parametrize("name", MISSES)
def test_near_miss_is_not_proved(graph: Any, name: str) -> None:
    found = facts(graph, name)
    assert found.kind not in MISSES[name][1] - {"general"}, found


@pytest.mark.parametrize("name", MISSES)
def test_what_is_proved_is_true(graph: Any, name: str, concrete: Any) -> None:
    low, _, masks = graph
    value, mask, found = low.outputs[list(MISSES).index(name)], masks[name], facts(graph, name)
    kept = mask == MISSES[name][2] if mask.dtype == torch.bool else mask == 0
    if found.row_never_empty:
        assert kept.any(-1).all()
    if mask.is_floating_point():
        assert not found.finite or mask.isfinite().all()
        assert found.fill is None or ((mask == found.fill) | kept).all()
    if found.predicate is not None:
        told = concrete(found.predicate, value, NAMES[-value.dim :], low)
        assert told is None or (told == kept.numpy()).all()


def test_buffers_are_not_read_without_leave(graph: Any) -> None:
    found, _, _ = graph
    prover = Prover()
    value = found.outputs[list(MISSES).index("rows_of_the_end")]
    proved = prover.prove(value, NAMES, *value.shape[-2:])
    assert proved.kind == "general" and not proved.buffers and proved.words


def test_there_are_enough() -> None:
    assert len(MISSES) >= 40
