"""Formulas of real tensors: what they say of every element, and what they refuse."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from optpass.passes.attention.masks.contents import formula, number

INF = float("-inf")


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def band(height: int, width: int, low: int, high: int) -> torch.Tensor:
    return ones(height, width).tril(high).triu(low)


KNOWN: dict[str, torch.Tensor] = {
    "triangle": ones(7, 7).tril(),
    "triangle of bools": ones(7, 9).tril(2).bool(),
    "upper infinities": torch.full((5, 8), INF).triu(1),
    "band": band(9, 9, -3, 0),
    "band of bytes in four dims": band(9, 9, -2, 2).to(torch.uint8)[None, None],
    "expanded": ones(6, 6).tril().expand(3, 2, 6, 6),
    "range": torch.arange(11),
    "range in two dims": torch.arange(11).expand(1, -1),
    "falling range of floats": torch.arange(10, -3, -2.0),
    "distances": torch.arange(6)[None] - torch.arange(6)[:, None],
    "absolute distances": (torch.arange(6)[None] - torch.arange(6)[:, None]).abs(),
    "constant": torch.full((3, 4), 2.5),
    "single element": torch.tensor(7),
    "step": torch.cat((torch.zeros(4), torch.ones(3), torch.zeros(2))),
    "columns": (torch.arange(8) < 3).expand(5, 8),
    "rows": (torch.arange(5) < 3)[:, None].expand(5, 8).clone(),
    "prefix and triangle": (ones(8, 8).tril().bool() | (torch.arange(8) < 3)),
    "ramp with a bend": torch.arange(9).clamp(min=3),
    "one row": torch.tensor([[True, True, False]]),
    "two by two": torch.tensor([[1, 2], [0, 1]]),
    "jumps": torch.tensor([5, 5, 1, 2, 3, -4]),
    "negative zero": torch.tensor([0.0, -0.0, 0.0]),
}


def changed(data: torch.Tensor, *place: int, to: Any = 5) -> torch.Tensor:
    data = data.clone()
    data[place] = to
    return data


UNKNOWN: dict[str, torch.Tensor] = {
    "random": torch.rand(8, 8),
    "random bools": torch.tensor([[True, False, True, False], [False, True, False, False], [True, False, False, True]]),
    "triangle with a hole": changed(ones(9, 9).tril(), 6, 3, to=0),
    "triangle with a dot above": changed(ones(9, 9).tril(), 2, 5),
    "triangle with another value": changed(ones(9, 9).tril(), 4, 4, to=0.5),
    "not a number": changed(ones(9, 9).tril(), 4, 4, to=float("nan")),
    "not a number in a row": torch.tensor([0.0, float("nan"), 0.0]),
    "all not numbers": torch.full((3, 3), float("nan")),
    "three dims": torch.arange(24).view(2, 3, 4),
    "long random range": torch.randperm(64),
    "slopes": torch.rand(16),
    "empty": torch.empty(0, 4),
    "complex": torch.ones(3, dtype=torch.complex64),
    "alternating rows": ((torch.arange(6)[:, None] + torch.arange(6)) % 2).bool(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_formula_gives_every_element(name: str) -> None:
    data = KNOWN[name]
    found = formula(data)
    assert found is not None
    for place in itertools.product(*map(range, data.shape)):
        value = found(place)
        assert value == number(data[place].item())
        assert isinstance(value, bool) == (data.dtype == torch.bool)
        assert isinstance(value, float) == data.is_floating_point()


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_formula(name: str) -> None:
    found = formula(UNKNOWN[name])
    data = UNKNOWN[name]
    if found is None:
        return
    pytest.fail(f"{name}: {[found(place) for place in itertools.product(*map(range, data.shape))]}")


@pytest.mark.parametrize("seed", range(30))
def test_one_flipped_element_is_seen(seed: int) -> None:
    """Whatever formula remains after a flip says so."""
    height, width = (int(n) for n in torch.randint(2, 10, (2,)))
    data = ones(height, width).tril(int(torch.randint(-2, 3, ()))).bool()
    place = (int(torch.randint(height, ())), int(torch.randint(width, ())))
    data[place] ^= True
    found = formula(data)
    if found is not None:
        assert all(found((r, c)) == data[r, c].item() for r in range(height) for c in range(width))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_large_buffer_takes_less_than_a_second(dtype: torch.dtype) -> None:
    data = torch.ones(1, 1, 4096, 4096, dtype=dtype).tril()
    formula(torch.ones(4, 4).tril())
    began = time.perf_counter()
    found = formula(data)
    assert time.perf_counter() - began < 1
    assert found is not None and found((0, 0, 5, 5)) == 1 and found((0, 0, 5, 6)) == 0
