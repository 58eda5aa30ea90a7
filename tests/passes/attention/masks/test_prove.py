"""The prover beyond single idioms: several masks, numbers, sizes, finiteness, and predicates as graph nodes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.attention.flex_attention import create_mask

from optpass.passes.attention.masks import Prover
from optpass.passes.attention.masks.mask_mod import Emitter, NotEmittableError

INF = float("-inf")
NAMES = ("b", "h", "q", "k")
LENGTH = 6


@pytest.fixture(params=[False, True], ids=["static", "dynamic"])
def dynamic(request: Any) -> bool:
    return bool(request.param)


def test_several_masks_keep_what_each_keeps(lowered: Any, concrete: Any, dynamic: bool) -> None:
    def masks(x: torch.Tensor) -> list[torch.Tensor]:
        place = torch.arange(x.shape[1])
        later = place[None] > place[:, None]
        return [later, torch.where(x[:, None, None, :, 0] > 0, 0.0, INF), x[:, None] * 2]

    x = torch.randn(2, LENGTH, LENGTH)
    low = lowered(masks, x, dynamic=dynamic)
    later, padding, bias = low.outputs
    prover, sizes = Prover(), (later.shape[0], later.shape[1])
    found = prover.prove_all([(later, ("q", "k"), False), (padding, NAMES, True)], *sizes)
    assert sorted(part.kind for part in found.parts) == ["causal", "padding"] and found.kind == "compound"
    assert not found.row_never_empty and not found.finite
    kept = ~masks(x)[0] & (masks(x)[1] == 0)
    told = concrete(found.predicate, padding, NAMES, low)
    assert (told[:, :, :1] == kept.numpy()[:, :, :1]).all()
    with_bias = prover.prove_all([(later, ("q", "k"), False), (bias, NAMES, True)], *sizes)
    assert with_bias.predicate is None and with_bias.kind == "general" and not with_bias.finite
    assert prover.prove_all([(later, ("q", "k"), False)], *sizes).kind == "causal"


def test_numbers_taken_for_truths(lowered: Any, dynamic: bool) -> None:
    def masks(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ones(x.shape[1], x.shape[1]).tril()]

    (value,) = lowered(masks, torch.randn(2, LENGTH), dynamic=dynamic).outputs
    prover = Prover()
    assert prover.prove(value, ("q", "k"), *value.shape, truth=True).kind == "causal"
    assert prover.prove(value, ("q", "k"), *value.shape, truth=True, keep_when=False).kind == "lookback"
    assert prover.prove(value, ("q", "k"), *value.shape).values == (0.0, 1.0)
    assert prover.prove(value, ("k", "q"), *value.shape[::-1], truth=True).kind == "lookback"


def test_each_dim_has_a_name_of_its_own(lowered: Any) -> None:
    (value,) = lowered(lambda x: [x * 2], torch.randn(2, 2)).outputs
    for names in (("q", "q"), ("q",), ("b", "q", "k")):
        with pytest.raises(ValueError, match="one name for each dim"):
            Prover().prove(value, names, 2, 2)


def test_numbers_that_tensors_are(lowered: Any, dynamic: bool) -> None:
    def tensors(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.tensor(8.0).sqrt(),
            torch.full((), 2.0) ** 3,
            torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min),
            torch.tensor(torch.finfo(torch.float32).min).to(torch.float16),
            torch.zeros_like(x) + 1,
            torch.ones(x.shape[1], dtype=torch.bool),
            torch.arange(x.shape[1]),
            x,
            torch.full((3,), float("nan")),
            torch.empty(3),
            torch.rand(()),
        ]

    x = torch.randn(2, LENGTH)
    prover = Prover()
    found = [prover.constant(value) for value in lowered(tensors, x, dynamic=dynamic).outputs]
    known = [torch.tensor(8.0).sqrt().item(), 8.0, torch.finfo(torch.float32).min, INF, 1.0, True]
    assert found[:6] == known and isinstance(found[5], bool)
    assert found[6:] == [None] * 5


def test_contents_that_a_number_rests_on_are_told(lowered: Any) -> None:
    low = lowered(lambda x: [x * 2], torch.full((3,), 4.0))
    (value,) = low.outputs
    found, buffers = Prover(low.contents).constant_now(value)
    assert found == 8.0 and [v.leaf for v in buffers] == ["input"]
    assert Prover(low.contents).constant(value) is None  # without a guard nothing may rest on contents
    assert Prover().constant_now(value) == (None, ())


def test_rows_may_be_empty_where_there_may_be_fewer_keys_than_queries(lowered: Any) -> None:
    def mask(x: torch.Tensor, past: torch.Tensor) -> list[torch.Tensor]:
        t, s = x.shape[1], past.shape[1]
        return [torch.ones(t, s, dtype=torch.bool).tril(diagonal=s - t)]

    (value,) = lowered(mask, torch.randn(2, 5), torch.randn(2, 9), dynamic=True).outputs
    found = Prover().prove(value, ("q", "k"), *value.shape)
    assert found.kind == "causal_offset" and not found.row_never_empty
    (value,) = lowered(mask, torch.randn(2, 5), torch.randn(2, 9)).outputs
    found = Prover().prove(value, ("q", "k"), *value.shape)
    assert found.kind == "causal_offset" and found.row_never_empty and found.offset == 4


def test_one_query_sees_a_prefix(lowered: Any) -> None:
    def mask(x: torch.Tensor) -> list[torch.Tensor]:
        place = torch.arange(x.shape[1])
        return [place[None] <= torch.tensor([3])[:, None], place[None] <= torch.tensor([LENGTH - 1])[:, None]]

    some, every = lowered(mask, torch.randn(2, LENGTH)).outputs
    assert Prover().prove(some, ("q", "k"), 1, LENGTH).kind == "prefix"
    assert Prover().prove(every, ("q", "k"), 1, LENGTH).kind == "all"


def test_sizes_that_are_not_those_of_the_scores_are_declined(lowered: Any, dynamic: bool) -> None:
    (value,) = lowered(
        lambda x: [torch.ones(x.shape[1], x.shape[1]).tril()], torch.randn(2, 5), dynamic=dynamic
    ).outputs
    found = Prover().prove(value, ("q", "k"), value.shape[0], value.shape[1] + 1)
    assert found.kind == "general" and found.predicate is None and "sizes" in found.words


def test_bias_of_slopes_is_finite_and_of_data_is_not(lowered: Any, dynamic: bool) -> None:
    def biases(x: torch.Tensor) -> list[torch.Tensor]:
        slopes = 1.0 / torch.pow(2, torch.arange(1, 5).float())
        distance = torch.arange(1 - x.shape[1], 1).view(1, 1, 1, -1)
        return [slopes.view(1, 4, 1, 1) * distance, x[:, None, None] * 2, torch.tanh(x)[:, None, None]]

    alibi, data, bounded = lowered(biases, torch.randn(2, LENGTH), dynamic=dynamic).outputs
    prover = Prover()
    facts = [prover.prove(v, NAMES, LENGTH, v.shape[-1]) for v in (alibi, data, bounded)]
    assert [f.kind for f in facts] == ["padding"] * 3
    assert [f.finite for f in facts] == [True, False, False]  # tanh of NaN is NaN
    assert all(f.predicate is None and f.fill is None for f in facts)


def test_three_levels_keep_only_zero(lowered: Any, dynamic: bool) -> None:
    low = torch.finfo(torch.float32).min

    def mask(x: torch.Tensor) -> list[torch.Tensor]:
        causal = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).triu(1)
        return [causal + torch.where(x[:, None, None] > 0, 0.0, torch.finfo(torch.float32).min)]

    (value,) = lowered(mask, torch.randn(2, LENGTH), dynamic=dynamic).outputs
    found = Prover().prove(value, NAMES, *value.shape[-2:])
    assert found.fill is None and found.values == (INF, low, 0.0) and not found.finite
    assert sorted(part.kind for part in found.parts) == ["causal", "padding"]


# ---- predicates as nodes --------------------------------------------------------------------------------------------


def masks_of_indices(x: torch.Tensor) -> list[torch.Tensor]:
    place, row = torch.arange(x.shape[1]), torch.arange(x.shape[1])[:, None]
    document = x[:, :, 0].long()
    return [
        (place <= row) & (row - place < 3),
        (x[:, :, 0] > 0)[:, None, None, :] & (place <= row),
        (document[:, None, :, None] == document[:, None, None, :]) & (place // 2 == row // 2),
        (place <= row) | (place < 2) | (x[:, :1, :1].long().unsqueeze(1) + 0 == place),
        (place[None] % 3 != row % 2) | (torch.maximum(place, 2 * row) == 4),
    ]


@pytest.mark.parametrize("which", range(5))
def test_predicate_as_a_mask_mod(lowered: Any, which: int) -> None:
    x = torch.randn(2, LENGTH, 4) * 2
    low = lowered(masks_of_indices, x)
    prover, value = Prover(), low.outputs[which]
    facts = prover.prove(value, NAMES[-value.dim :], LENGTH, LENGTH)
    graph = fx.Graph()
    axes = {name: graph.placeholder(name) for name in NAMES}
    held: dict[Any, fx.Node] = {}

    def tensor(value: Any) -> fx.Node:
        if value not in held:
            with graph.inserting_before(axes["b"]):
                held[value] = graph.placeholder(f"held{len(held)}")
        return held[value]

    graph.output(Emitter(prover.engine, graph, axes, tensor, int).predicate(facts.predicate))
    module = fx.GraphModule(torch.nn.Module(), graph)
    real = [low.inputs[value] for value in held]
    made = create_mask(lambda b, h, q, k: module(*real, b, h, q, k), 2, 1, LENGTH, LENGTH, device="cpu")
    assert torch.equal(made, masks_of_indices(x)[which].expand(2, 1, LENGTH, LENGTH))


def test_what_cannot_be_emitted_says_why(lowered: Any) -> None:
    low = lowered(lambda x: [(x[:, :, 0] > 0)[:, None, None, :]], torch.randn(2, LENGTH, 4))
    prover = Prover()
    predicate = prover.prove(low.outputs[0], NAMES, LENGTH, LENGTH).predicate
    assert predicate is not None
    graph = fx.Graph()
    axes = {name: graph.placeholder(name) for name in NAMES}
    with pytest.raises(NotEmittableError, match="no node holds"):
        Emitter(prover.engine, graph, axes, lambda value: None, int).predicate(predicate)
    with pytest.raises(NotEmittableError, match="axis b"):
        Emitter(prover.engine, graph, {"k": axes["k"]}, lambda value: axes["q"], int).predicate(predicate)


def test_many_masks_take_milliseconds(lowered: Any) -> None:
    def masks(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ones(x.shape[1], x.shape[1]).tril(i) == 0 for i in range(48)]

    values = lowered(masks, torch.randn(2, LENGTH), dynamic=True).outputs
    prover = Prover()
    prover.prove(values[0], ("q", "k"), *values[0].shape, keep_when=False)
    began = time.perf_counter()
    facts = [prover.prove(value, ("q", "k"), *value.shape, keep_when=False) for value in values]
    assert time.perf_counter() - began < 48 * 0.01  # a fifth of it on an idle core
    assert [f.offset for f in facts] == list(range(48))
