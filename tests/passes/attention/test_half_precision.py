"""Half precision in training: gradients beside a float64 reference are at least as exact as the written program's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import optpass
from optpass.backend.measured_attention import measure
from optpass.passes.attention import gate
from optpass.passes.attention.blocks.operator import attention_in_blocks
from optpass.passes.attention.blocks.regions import Region
from optpass.passes.attention.gate import Verdict
from optpass.passes.attention.problem import Problem
from optpass.passes.processor import multiplied_in

pytestmark = pytest.mark.usefixtures("clean")

SCALE = 0.125


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-1) @ v


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.zeros(k.shape[2], dtype=k.dtype).masked_fill(torch.arange(k.shape[2]) > k.shape[2] - 9, -1e4)
    return (q @ k.mT * SCALE + hidden).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20.0 * torch.tanh(q @ k.mT * (SCALE / 20.0))).softmax(-1) @ v


def operands(mean: float, width: int = 64) -> list[Tensor]:
    """Keys and values with a common mean, as layers behind an embedding of all tokens' types have."""
    q, k, v = (torch.randn(2, 2, 192, d) for d in (64, 64, width))
    return [q, k + mean, v + mean]


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype, grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]
    return [g.double() for g in torch.autograd.grad(function(*leaves), leaves, grad.to(dtype))]


def errors(found: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]


def call(gm: Any, _: Any) -> Any:
    return gm


def only_blocks(problem: Any, target: str, *_: Any, **__: Any) -> Verdict:
    return Verdict(target == "blocks", 1.0, 2.0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 0.7, 3.0])
@pytest.mark.parametrize(
    ("inner", "written", "kernel"),
    [
        *((inner, f, "SDPA cpu_flash in float32") for inner in (call, "aot_eager") for f in (plain, upcast, padded)),
        (call, capped, "FlexAttention in float32"),
    ],
)
def test_the_kernel_is_as_exact_as_the_program(
    inner: Any, written: Callable[..., Tensor], kernel: str, mean: float, dtype: torch.dtype
) -> None:
    tensors, grad = [t.to(dtype) for t in operands(mean)], torch.randn(2, 2, 192, 64).to(dtype)
    compiled = torch.compile(written, backend="optpass", options={"inner": inner, "attention": "always"})
    ours = gradients(compiled, tensors, dtype, grad)
    (site,) = optpass.report().sites("attention")
    assert site.after.startswith(kernel) and "common mean" in site.reason
    right = gradients(written, tensors, torch.float64, grad)
    eager = errors(gradients(written, tensors, dtype, grad), right)
    assert all(one <= other for one, other in zip(errors(ours, right), eager, strict=True))


def test_values_wider_than_keys() -> None:
    tensors = [torch.randn(2, 2, 64, d).bfloat16() for d in (16, 16, 32)]
    grad = torch.randn(2, 2, 64, 32).bfloat16()
    compiled = torch.compile(plain, backend="optpass", options={"inner": "aot_eager", "attention": "always"})
    ours, right = (
        gradients(f, tensors, d, grad) for f, d in ((compiled, torch.bfloat16), (plain, torch.float64))
    )  # fmt: skip
    eager = errors(gradients(plain, tensors, torch.bfloat16, grad), right)
    assert all(one <= other for one, other in zip(errors(ours, right), eager, strict=True))


def test_inference_keeps_the_dtype() -> None:
    with torch.no_grad():
        tensors = [t.bfloat16() for t in operands(1.0)]
        torch.compile(plain, backend="optpass", options={"inner": call, "attention": "always"})(*tensors)
    (site,) = optpass.report().sites("attention")
    assert "float32" not in site.after


@pytest.mark.parametrize("written", [plain, upcast])
@pytest.mark.parametrize("mean", [1.0, 3.0, 30.0])
def test_blocks_take_a_common_mean_of_values_apart(mean: float, written: Callable[..., Tensor]) -> None:
    tensors, grad = [t.bfloat16() for t in operands(mean)], torch.randn(2, 2, 192, 64).bfloat16()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_in_blocks(q, k, v, scale=SCALE)

    right = gradients(written, tensors, torch.float64, grad)
    found, eager = (errors(gradients(f, tensors, torch.bfloat16, grad), right) for f in (ours, written))
    assert all(one <= 1.05 * other for one, other in zip(found, eager, strict=True))


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "softcap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_pass_a_softmax_in_float32_as_the_program_does(dtype: torch.dtype, kind: str) -> None:
    tensors, grad = [torch.randn(2, 3, 160, 64).to(dtype) for _ in range(3)], torch.randn(2, 3, 160, 64).to(dtype)
    seen = torch.rand(160, 160) > 0.3
    bias = torch.randn(2, 1, 160, 160)
    cap = 20.0 if kind == "softcap" else 0.0

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * SCALE
        scores = cap * torch.tanh(scores / cap) if cap else scores
        if kind in ("causal", "bool"):
            scores = scores.masked_fill(~(seen.tril() if kind == "causal" else seen).logical_or(causal), -torch.inf)
        scores = scores + bias.to(scores.dtype) if kind == "float" else scores
        return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype) @ v

    causal = torch.ones(160, 160, dtype=torch.bool).tril() if kind == "causal" else torch.eye(160, dtype=torch.bool)
    mask = {"bool": seen.logical_or(causal), "float": bias.to(dtype)}.get(kind)

    def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_in_blocks(q, k, v, mask, kind == "causal", SCALE / (cap or 1.0), cap, wide=True)

    right = gradients(written, tensors, torch.float64, grad)
    found, eager = (errors(gradients(f, tensors, dtype, grad), right) for f in (in_blocks, written))
    assert all(one <= 1.005 * other for one, other in zip(found, eager, strict=True))


@pytest.mark.parametrize("written", [plain, upcast])
def test_the_softmax_is_passed_in_the_dtype_that_it_is_written_in(
    written: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "decide", only_blocks)
    tensors = [torch.randn(1, 2, 96, 64).bfloat16().requires_grad_() for _ in range(3)]
    calls: list[bool] = []
    kept = Region.rooms

    def rooms(self: Region, *names: str, wide: bool = False) -> Any:
        calls.append(wide)
        return kept(self, *names, wide=wide)

    monkeypatch.setattr(Region, "rooms", rooms)
    torch.compile(written, backend="optpass", options={"inner": "aot_eager"})(*tensors).sum().backward()
    assert len(optpass.report().sites("attention")) == 1
    rounds = multiplied_in(torch.bfloat16) == torch.bfloat16  # else all of it is in float32 as it is
    assert calls == [False, rounds and written is upcast]


def test_blocks_keep_a_mean_that_is_not_finite_to_its_head() -> None:
    tensors, grad = [t.bfloat16() for t in operands(3.0)], torch.randn(2, 2, 192, 64).bfloat16()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_in_blocks(q, k, v, scale=SCALE)

    clean = gradients(ours, tensors, torch.bfloat16, grad)
    tensors[2][0, 0, 150], tensors[2][1, 1, 120] = float("nan"), float("inf")
    for one, other in zip(gradients(ours, tensors, torch.bfloat16, grad), clean, strict=True):
        assert torch.equal(one[0, 1], other[0, 1]) and torch.equal(one[1, 0], other[1, 0])


def test_measured_gain_times_what_is_called() -> None:
    problem = Problem("cpu", torch.bfloat16, 1, 2, 2, 64, 64, 16, 16, mask="float", mask_numel=64 * 64, training=True)
    assert all(figure > 0 for figure in measure(problem, "cpu_flash", torch.float32))
