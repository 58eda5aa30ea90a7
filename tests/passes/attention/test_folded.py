"""Heads among the batch where a kernel's own layout of its result would have to be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from optpass.passes.attention.write.emit import Writer

pytestmark = pytest.mark.usefixtures("clean", "seeded")

B, H, S, D = 2, 3, 17, 8


@pytest.fixture(autouse=True)
def rows_before_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of SDPA in the strides that the kernels of a GPU give them, as far as the pass can see."""
    real = Writer.evaluate

    def evaluate(self: Writer, node: fx.Node, args: Any, kwargs: Any) -> Any:
        found = real(self, node, args, kwargs)
        if node.target is F.scaled_dot_product_attention:
            _, heads, rows, width = found.shape
            strides = (rows * heads * width, width, heads * width, 1)
            with found.fake_mode:
                return torch.empty_strided(found.shape, strides, requires_grad=found.requires_grad)
        return found

    monkeypatch.setattr(Writer, "evaluate", evaluate)


def as_it_is(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / D**0.5, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1) @ v


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The layout that kernels write."""
    return as_it_is(q, k, v).transpose(1, 2).reshape(B, S, H * D)


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return as_it_is(q, k, v).view(B * H, S, D)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / D**0.5 + torch.linspace(0, 1, S), -1) @ v


def operands(*, first: bool = True) -> list[Tensor]:
    shape = (B, H, S, D) if first else (B, S, H, D)
    drawn = [torch.randn(shape) for _ in range(3)]
    return drawn if first else [t.transpose(1, 2) for t in drawn]


@pytest.mark.parametrize(
    ("program", "first", "folded", "copied"),
    [
        (as_it_is, True, True, False),
        (causal, True, True, False),
        (viewed, True, True, False),
        (joined, True, False, False),
        (biased, True, False, True),
        (as_it_is, False, False, True),  # the operands would be copied
    ],
)
def test_calls(
    program: Callable[..., Tensor], first: bool, folded: bool, copied: bool, compiled: Any, kernels: Any
) -> None:
    given = operands(first=first)
    result = compiled(program)(*given)
    (call,) = kernels.sdpa
    shape = call.args[0].meta["example_value"].shape
    assert shape == ((B * H, 1, S, D) if folded else (B, H, S, D))
    assert bool(kernels.nodes("clone")) is copied
    torch.testing.assert_close(result, program(*given))


def test_training(compiled: Any) -> None:
    given = [t.requires_grad_() for t in operands()]
    ours = torch.autograd.grad(compiled(causal)(*given).sin().sum(), given)
    exact = [t.detach().double().requires_grad_() for t in given]
    for got, wanted in zip(ours, torch.autograd.grad(causal(*exact).sin().sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


def test_dynamic_sizes_are_left(compiled: Any, kernels: Any) -> None:
    result = compiled(as_it_is, dynamic=True)(*operands())
    assert kernels.sdpa and result.shape == (B, H, S, D)
