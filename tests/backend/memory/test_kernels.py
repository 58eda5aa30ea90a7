"""Which kernels Inductor merges and which buffers it takes again where the smallest peak is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen.wrapper import AllocateLine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from optpass.backend.compat import memory as inductor
from optpass.backend.memory.partition.order import least_peak
from optpass.backend.memory.replay.graph_values import values_of_inputs


def _lowered(program: Any, *sizes: tuple[int, ...], improve: Any) -> str:
    with FakeTensorMode() as mode:
        inputs = [torch.empty(size) for size in sizes]
    graph = make_fx(program)(*inputs)
    assert mode is not None
    return inductor.lower(graph, values_of_inputs(graph), is_backward=True, improve=improve).source


def _product_first(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    product = torch.mm(a, b)
    return [product + torch.mm(c, c).sin()]


def _product_last(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    other = torch.mm(c, c).sin()
    return [torch.mm(a, b) + other]


@pytest.mark.parametrize(("program", "fused"), [(_product_first, False), (_product_last, True)])
def test_a_product_does_not_wait_for_a_sum(program: Any, fused: bool) -> None:
    sizes = (8, 64), (64, 8), (8, 8)
    assert "addmm" in _lowered(program, *sizes, improve=None)
    assert ("addmm" in _lowered(program, *sizes, improve=least_peak)) is fused


def test_a_buffer_is_not_kept_for_a_later_kernel() -> None:
    freed, behind, later = (SimpleNamespace(scheduler_node_index=i, comm_buffer=False) for i in (3, 4, 5))
    wants = AllocateLine.should_reuse_buffer
    estimate = SimpleNamespace(overall_peak_memory=100, peak_between=lambda *_: 0)
    later.wrapper = SimpleNamespace(estimate_peak=estimate)
    assert wants(later, freed, 10)  # type: ignore[arg-type]
    with inductor.tightened(least_peak):
        assert AllocateLine.should_reuse_buffer(behind, freed, 10)  # type: ignore[arg-type]
        assert not AllocateLine.should_reuse_buffer(later, freed, 10)  # type: ignore[arg-type]
    assert AllocateLine.should_reuse_buffer is wants


def _far_apart(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    product = torch.mm(a, b)
    early = torch.mm(product.sin(), c)
    return [early, product.cos() * torch.mm(c, c)]


def _side_by_side(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    product, other = torch.mm(a, b), torch.mm(c, c)
    return [torch.mm(product.sin(), c), product.cos() * other]


def _frees_as_much(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    product, other = torch.mm(a, b), torch.mm(c, c)
    early = torch.mm(product.sin() * other.sin(), c)
    return [torch.mm(early, c), product.cos() * other.cos()]


@pytest.mark.parametrize(("program", "merged"), [(_far_apart, False), (_side_by_side, True), (_frees_as_much, True)])
def test_kernels_do_not_run_before_their_time_to_be_merged(program: Any, merged: bool) -> None:
    sizes = (8, 64), (64, 8), (8, 8)
    for improve, one in ((None, True), (least_peak, merged)):
        source = _lowered(program, *sizes, improve=improve)
        assert (source.count("async_compile.cpp_pybinding(") == 1) is one


def _one_after_the_other(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """Of three kernels that follow each other, the second is the last to read `large`, and the third makes as much."""
    large = torch.mm(a, b)
    product, column = torch.mm(large, c), large.sum(0)
    return [torch.mm(a.sin().cos(), b), product, column]


def _reads_little(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """Of two kernels that follow each other, the first is the last to read something small."""
    small = torch.mm(c, c)
    return [small.sum(0), torch.mm(a.sin(), b)]


@pytest.mark.parametrize(("program", "rows", "functions"), [(_one_after_the_other, 64, 2), (_reads_little, 2, 1)])
def test_what_is_read_for_the_last_time_is_released_before_the_next_kernel(
    program: Any, rows: int, functions: int
) -> None:
    sizes = (64, 64), (64, 64), (rows, 2)
    for improve, expected in ((None, 1), (least_peak, functions)):
        source = _lowered(program, *sizes, improve=improve)
        assert source.count("async_compile.cpp_pybinding(") == expected
        assert ("buf3 = buf0; del buf0  # reuse" in source) is (expected == 2)


def _in_parts(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """Two tensors are made in parts, of which the small one is the same."""
    aten = torch.ops.aten
    one = torch.cat([a.sin(), c], 1)
    product = torch.mm(aten.permute(one, [1, 0]), one)
    square = aten.slice(aten.slice(product, 0, 0, 64), 1, 0, 64)
    other = torch.cat([torch.mm(a, square).cos(), c], 1)
    return [torch.mm(aten.permute(other, [1, 0]), b)]


@pytest.mark.parametrize("improve", [None, least_peak])
def test_a_small_part_of_a_tensor_does_not_allocate_all_of_it_before_its_time(improve: Any) -> None:
    source = _lowered(_in_parts, (64, 64), (64, 64), (64, 2), improve=improve)
    allocated, product = source.rindex("empty_strided_cpu((64, 66)"), source.index("extern_kernels.mm")
    assert (allocated > product) is (improve is not None)
