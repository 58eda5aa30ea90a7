"""The fusion model on small programs: kernels and bytes derived by hand, and Inductor's own on the models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from optpass import models
from optpass.backend.ahead import capture_model
from optpass.passes.roofline.analysis import program_of
from optpass.passes.roofline.program import Program

B = 4  # bytes of a float32


def program(fn: Callable[..., object], *inputs: torch.Tensor, train: bool = False, on_cpu: bool = True) -> Program:
    captured = capture_model(fn, inputs, train=train)
    return program_of([g for item in captured.items for g in item.graphs], on_cpu=on_cpu)


def sizes(result: Program) -> list[tuple[str, int, int]]:
    return [(g.kind, g.reads, g.writes) for g in result.groups]


@pytest.fixture(params=[True, False], ids=["cpp", "triton"])
def on_cpu(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_pointwise_chain_is_one_kernel(on_cpu: bool) -> None:
    x, y = torch.randn(32, 48), torch.randn(32, 48)
    found = program(lambda x, y: torch.relu(x + y) * 2 - x, x, y, on_cpu=on_cpu)
    n = 32 * 48 * B
    assert sizes(found) == [("pointwise", 2 * n, n)]
    assert all(op.group == 0 for op in found.ops if op.cost is not None and op.cost.kind == "pointwise")


def test_broadcast_reads_what_is_stored(on_cpu: bool) -> None:
    x, bias = torch.randn(32, 48), torch.randn(48)
    assert sizes(program(lambda x, b: (x + b).sin(), x, bias, on_cpu=on_cpu)) == [
        ("pointwise", (32 * 48 + 48) * B, 32 * 48 * B)
    ]


def test_a_slice_reads_the_slice(on_cpu: bool) -> None:
    x = torch.randn(32, 48)
    assert sizes(program(lambda x: x[:, 8:16].exp(), x, on_cpu=on_cpu)) == [("pointwise", 32 * 8 * B, 32 * 8 * B)]


def test_a_gather_reads_the_rows_it_takes(on_cpu: bool) -> None:
    table, index = torch.randn(1000, 16), torch.randint(0, 1000, (10,))
    assert sizes(program(lambda t, i: F.embedding(i, t), table, index, on_cpu=on_cpu)) == [
        ("pointwise", 10 * 16 * B + 10 * 8, 10 * 16 * B)
    ]


def test_softmax_is_one_kernel() -> None:
    x = torch.randn(64, 128)
    n = 64 * 128 * B
    assert sizes(program(lambda x: x.softmax(-1), x)) == [("reduction", n, n)]


def test_layer_norm_is_one_kernel(on_cpu: bool) -> None:
    x, w, b = torch.randn(64, 128), torch.randn(128), torch.randn(128)
    n = 64 * 128 * B
    found = sizes(program(lambda x, w, b: F.layer_norm(x, (128,), w, b), x, w, b, on_cpu=on_cpu))
    assert found == [("reduction", n + 2 * 128 * B, n)]


def test_a_matmul_does_not_fuse_and_its_epilogue_is_one_kernel(on_cpu: bool) -> None:
    x, w = torch.randn(32, 64), torch.randn(64, 96)
    found = sizes(program(lambda x, w: F.gelu(x @ w) * 0.5, x, w, on_cpu=on_cpu))
    out = 32 * 96 * B
    assert found == [("matmul", (32 * 64 + 64 * 96) * B, out), ("pointwise", out, out)]


def test_a_transpose_between_two_kernels_keeps_them_apart_on_cpu() -> None:
    x = torch.randn(32, 48)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored = x.sigmoid()
        return stored, (stored.t().contiguous() + 1).sum(0)

    assert len(program(fn, x).groups) >= 2


def test_two_results_of_one_input_share_its_read(on_cpu: bool) -> None:
    x = torch.randn(32, 48)
    n = 32 * 48 * B
    assert sizes(program(lambda x: (x.sin(), x.cos()), x, on_cpu=on_cpu)) == [("pointwise", n, 2 * n)]


def test_a_reshape_into_a_matmul_copies_once() -> None:
    x, w = torch.randn(4, 8, 16), torch.randn(128, 32)
    found = sizes(program(lambda x, w: x.transpose(0, 1).reshape(8, 64) @ w[:64], x, w))
    assert found[0] == ("pointwise", 512 * B, 512 * B)
    assert found[1] == ("matmul", (512 + 64 * 32) * B, 8 * 32 * B)


def test_backward_is_there_and_marked() -> None:
    x = torch.randn(16, 32)
    found = program(lambda x: F.linear(x, weight).relu().sum(), x, train=True)
    assert {g.phase for g in found.groups} == {"forward", "backward"}
    matmuls = [op.phase for op in found.ops if op.cost is not None and op.cost.kind == "matmul"]
    assert matmuls == ["forward", "backward"]


weight = torch.nn.Parameter(torch.randn(8, 32))


def test_recomputed_ops_are_told_apart() -> None:
    w = torch.nn.Parameter(torch.randn(32, 32))
    found = program(lambda x: (F.gelu(x @ w) @ w).sum(), torch.randn(16, 32), train=True)
    recomputed = {op.target for op in found.ops if op.recomputed}
    assert recomputed
    assert not any("mm" in target for target in recomputed)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_every_model_has_a_kernel_for_every_op_that_computes(name: str) -> None:
    module, inputs = models.build(name, "tiny")
    captured = capture_model(module, inputs, train=True)
    found = program_of([g for item in captured.items for g in item.graphs])
    assert not found.unknown
    in_kernels = {index for group in found.groups for index in group.ops}
    heavy = {
        i for i, op in enumerate(found.ops) if op.cost is not None and op.cost.kind in ("matmul", "conv", "attention")
    }
    assert heavy <= in_kernels
    assert all(g.reads >= 0 and g.writes >= 0 for g in found.groups)
    assert sum(g.reads + g.writes for g in found.groups) < sum(op.reads + op.writes for op in found.ops)


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("name", ["dlrm", "gpt"])
def test_bytes_are_those_of_inductors_kernels(name: str) -> None:
    from optpass.bench.fusion_bytes import measure

    for touched, predicted, _, _ in measure(name, "tiny", train=True, seed=0).values():
        assert abs(predicted / touched - 1) < 0.15
