"""Index maps against torch's own views, loop orders against Inductor's own."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optpass.passes.roofline import views
from optpass.passes.roofline.index_map import IndexMap, contiguous, merge_dims
from optpass.passes.roofline.loops import pick_order


def positions(m: IndexMap) -> torch.Tensor:
    """The buffer position of every element that the map reads."""
    result = torch.full(m.shape, m.offset)
    for dim, (size, stride) in enumerate(zip(m.shape, m.strides, strict=True)):
        steps = torch.arange(size) * stride
        result = result + steps.reshape([-1 if d == dim else 1 for d in range(len(m.shape))])
    return result


def random_view(rng: random.Random, tensor: torch.Tensor) -> tuple[str, list[object], torch.Tensor]:
    """A view op that fits `tensor`: its name, arguments, and torch's own result."""
    rank = tensor.dim()
    choice = rng.choice(["permute", "unsqueeze", "slice", "select", "view", "expand", "transpose"])
    dim = rng.randrange(rank)
    if choice == "permute":
        order = rng.sample(range(rank), rank)
        return choice, [order], tensor.permute(order)
    if choice == "transpose":
        other = rng.randrange(rank)
        return choice, [dim, other], tensor.transpose(dim, other)
    if choice == "unsqueeze":
        return choice, [dim], tensor.unsqueeze(dim)
    if choice == "slice":
        start, step = rng.randrange(tensor.shape[dim]), rng.choice([1, 2])
        return choice, [dim, start, tensor.shape[dim], step], tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if choice == "select" and rank > 1:
        index = rng.randrange(tensor.shape[dim])
        return choice, [dim, index], tensor.select(dim, index)
    if choice == "expand":
        shape = [3, *tensor.shape]
        return choice, [shape], tensor.expand(shape)
    shape = list(tensor.shape)
    if rank > 1 and rng.random() < 0.5:
        at = rng.randrange(rank - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif shape[dim] % 2 == 0 and shape[dim]:
        shape[dim : dim + 1] = [2, shape[dim] // 2]
    return "view", [shape], tensor.reshape(shape)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_view_chains_read_what_torch_reads(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    count = 1
    for size in shape:
        count *= size
    tensor = torch.arange(count).reshape(shape)
    m = IndexMap(tuple(shape), contiguous(shape))
    for _ in range(rng.randint(1, 5)):
        name, args, tensor = random_view(rng, tensor)
        m = views.apply(name, m, args, tuple(tensor.shape))
        assert m.shape == tuple(tensor.shape)
        if not m.opaque:
            assert torch.equal(positions(m), tensor), (name, args)


def test_a_reshape_across_a_transpose_is_opaque_and_equals_only_itself() -> None:
    m = IndexMap((3, 4), (4, 1)).permuted([1, 0])
    assert m.reshaped((12,)).opaque
    assert m.reshaped((12,)).key() != m.reshaped((12,)).key()


def test_a_reshape_that_strides_can_say_is_not_opaque() -> None:
    assert IndexMap((2, 3, 4), (12, 4, 1)).reshaped((6, 4)) == IndexMap((6, 4), (4, 1))
    assert IndexMap((2, 3, 4), (24, 8, 1)).reshaped((6, 2, 2)) == IndexMap((6, 2, 2), (8, 2, 1))


@pytest.mark.parametrize(("shape", "wanted"), [((0, 4, 6), (0, 2, 2, 6)), ((4, 0, 6), (0, 6)), ((0,), (3, 0))])
def test_a_reshape_of_nothing_is_not_opaque(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    made = IndexMap(shape, contiguous(shape)).reshaped(wanted)
    assert (made.shape, made.opaque, made.elements()) == (wanted, 0, 0)


def test_keys_tell_parts_of_a_buffer_apart_and_ignore_how_dimensions_are_written() -> None:
    whole = IndexMap((4, 6), (6, 1))
    assert whole.key() == whole.reshaped((24,)).key() == whole.reshaped((2, 2, 6)).key()
    assert whole.sliced(1, 0, 3, 1).key() != whole.sliced(1, 3, 3, 1).key()
    assert IndexMap((4,), (1,)).key() == IndexMap((4, 6), (1, 0)).key()  # trailing broadcast dimensions do not count


def test_elements_counts_broadcast_dimensions_once() -> None:
    assert IndexMap((8, 5), (0, 1)).elements() == 5
    assert IndexMap((8, 5), (5, 1)).elements() == 40


def test_split_parts() -> None:
    tensor = torch.arange(24).reshape(2, 12)
    m = IndexMap((2, 12), (12, 1))
    parts = tensor.split([3, 4, 5], 1)
    for i, part in enumerate(parts):
        found = views.part("split_with_sizes", m, [[3, 4, 5], 1], i, [p.shape for p in parts])
        assert torch.equal(positions(found), part)
    for i, part in enumerate(tensor.unbind(0)):
        assert torch.equal(positions(views.part("unbind", m, [0], i, [part.shape])), part)


@pytest.mark.parametrize(
    ("shape", "maps", "sizes"),
    [
        ((2, 3, 4), [(12, 4, 1)], (24,)),
        ((2, 3, 4), [(12, 4, 1), (0, 4, 1)], (2, 12)),
        ((2, 3, 4), [(12, 4, 1), (3, 1, 0)], (6, 4)),
        ((2, 1, 4), [(4, 7, 1)], (8,)),
        ((), [()], ()),
    ],
)
def test_merged_loops(shape: tuple[int, ...], maps: list[tuple[int, ...]], sizes: tuple[int, ...]) -> None:
    assert merge_dims(shape, maps)[0] == sizes


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_loop_order_is_inductors(seed: int) -> None:
    scheduler = pytest.importorskip("torch._inductor.scheduler")
    rng = random.Random(seed)
    rank = rng.randint(1, 4)
    sizes = [rng.choice([1, 2, 3, 8]) for _ in range(rank)]
    maps = []
    for _ in range(rng.randint(1, 3)):
        strides, step = [0] * rank, 1
        for dim in rng.sample(range(rank), rank):
            strides[dim] = 0 if rng.random() < 0.2 else step
            step *= sizes[dim]
        maps.append(strides)
    assert pick_order(maps, sizes) == list(reversed(scheduler.pick_loop_order(maps, sizes)))
