"""Where the inner compiler fails on what the passes made of a graph, it is given the graph as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import optpass

pytestmark = pytest.mark.usefixtures("clean", "drawn")
INNERS = pytest.mark.parametrize("inner", ["aot_eager", "inductor"])


class Careless(torch.autograd.Function):
    """Views its gradient, which is contiguous in the program as it is written; a fused kernel's is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad.view(-1) * 1.5).view(grad.shape)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(7, 11)


def attention(function: Any) -> Any:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (function.apply(q) @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v

    return program


def compiled(program: Any, inner: str, **options: Any) -> Any:
    return torch.compile(program, backend="optpass", options={"inner": inner, "attention": "always", **options})


def step(call: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    result = call(*inputs)
    return result.detach(), *torch.autograd.grad(result.sin().sum(), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"memory_budget": 10**9}], ids=["plain", "budget"])
@INNERS
def test_the_graph_is_compiled_as_it_was(inner: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    inputs = [torch.randn(2, 4, 18, 16, requires_grad=True) for _ in range(3)]
    program = attention(Careless)
    ours = step(compiled(program, inner, **options), inputs)
    for got, wanted in zip(ours, step(program, inputs), strict=True):
        torch.testing.assert_close(got, wanted)
    (graph,) = optpass.report().graphs
    (undone,) = (item for item in graph.passes if item.name == "attention")
    assert undone.error is not None and undone.error.startswith("the inner compiler failed on the graph that it made: ")
    assert not optpass.report().sites("attention")
    (warning,) = optpass.report().warnings
    assert warning.startswith("attention had to be undone on a graph: ") and "view" in warning
    assert "attention had to be undone" in caplog.text


@INNERS
def test_strict_it_is_an_error(inner: str) -> None:
    inputs = [torch.randn(2, 4, 18, 16, requires_grad=True) for _ in range(3)]
    with pytest.raises(Exception, match="view"):
        compiled(attention(Careless), inner, strict=True)(*inputs)


@INNERS
def test_what_fails_by_itself_fails_as_it_does(inner: str) -> None:
    inputs = [torch.randn(2, 4, 18, 16, requires_grad=True) for _ in range(3)]
    with pytest.raises(Exception, match=r"7, ?11"):
        compiled(attention(Broken), inner)(*inputs)
    assert not optpass.report().warnings
