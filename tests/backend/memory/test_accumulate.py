"""Gradients that are scattered into another one instead of into zeros: the same sums, and near misses left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from optpass.backend.memory.partition.accumulate import accumulate_in_place

A = torch.ops.aten
Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.full([6, 4], 0, dtype=x.dtype)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(6, 3), torch.tensor([1, 5, 1, 0]), torch.randn(4, 4)


def _product(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, torch.ones(3, 4))


def scattered(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x) + A.index_put(_zeros(x), [i], g, True)


def scattered_first(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return A._unsafe_index_put(_zeros(x), [i], g, True) + _product(x)


def masked(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x) + A._unsafe_masked_index_put_accumulate(_zeros(x), (i > 0).unsqueeze(-1), [i], g)


@pytest.mark.parametrize("program", [scattered, scattered_first, masked])
def test_a_sum_is_scattered_into(program: Program) -> None:
    graph = make_fx(program)(*_inputs())
    inputs = _inputs()
    expected = program(*inputs)
    assert accumulate_in_place(graph) == 1
    graph.graph.lint()
    assert not graph.graph.find_nodes(op="call_function", target=A.full.default)
    assert not graph.graph.find_nodes(op="call_function", target=A.add.Tensor)
    torch.testing.assert_close(graph(*inputs), expected)


def overwrites(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x) + A.index_put(_zeros(x), [i], g, False)


def not_zeros(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x) + A.index_put(_zeros(x) + 1, [i], g, True)


def ones(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x) + A.index_put(torch.full([6, 4], 1.0), [i], g, True)


def read_elsewhere(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    y = _product(x)
    return y + A.index_put(_zeros(x), [i], g, True), y.sum()


def scatter_read_elsewhere(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    s = A.index_put(_zeros(x), [i], g, True)
    return _product(x) + s, s


def scaled(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return torch.add(_product(x), A.index_put(_zeros(x), [i], g, True), alpha=2)


def broadcast(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x)[:1].clone() + A.index_put(_zeros(x), [i], g, True)


def view(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    y = _product(x)
    return (y.view(6, 4) + A.index_put(_zeros(x), [i], g, True)) * y


def other_dtype(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return _product(x).half() + A.index_put(_zeros(x), [i], g, True)


def other_strides(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return torch.empty_strided([6, 4], [1, 6]).copy_(_product(x)) + A.index_put(_zeros(x), [i], g, True)


def given(x: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
    return g + A.index_put(torch.full([4, 4], 0.0), [i % 4], g, True)


@pytest.mark.parametrize(
    "program",
    [
        overwrites,
        not_zeros,
        ones,
        read_elsewhere,
        scatter_read_elsewhere,
        scaled,
        broadcast,
        view,
        other_dtype,
        other_strides,
        given,
    ],
)
def test_a_near_miss_is_left_alone(program: Program) -> None:
    graph = make_fx(program)(*_inputs())
    before = str(graph.graph)
    assert accumulate_in_place(graph) == 0
    assert str(graph.graph) == before
