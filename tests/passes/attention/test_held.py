"""Masked scores become a number that a buffer holds, as in GPT-J: taken for it as long as the buffer has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optpass

N, D = 24, 8


class Attention(nn.Module):
    """GPT-J's: a tril mask of bytes, and the mask's value, in buffers."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(N, N, dtype=torch.uint8)).view(1, 1, N, N))
        if value.requires_grad:
            self.masked_bias = nn.Parameter(value)
        else:
            self.register_buffer("masked_bias", value)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = self.bias[:, :, : q.shape[2], : k.shape[2]].bool()
        scores = torch.where(seen, q @ k.mT, self.masked_bias.to(q.dtype))
        return (scores / D**0.5).softmax(-1) @ v


def operands(grad: bool) -> list[Tensor]:
    return [torch.randn(2, 3, N, D, requires_grad=grad) for _ in range(3)]


def compare(module: nn.Module, call: Any, grad: bool) -> None:
    inputs = operands(grad)
    ours, theirs = call(*inputs), module(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if grad:
        weight = torch.randn_like(ours)
        for a, b in zip(*(torch.autograd.grad((o * weight).sum(), inputs) for o in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_number_of_a_buffer(grad: bool, compiled: Any, kernels: Any) -> None:
    torch._dynamo.reset()
    optpass.reset_report()
    module = Attention(torch.tensor(-1e9))
    call = compiled(module)
    compare(module, call, grad)
    (site,) = optpass.report().sites("attention")
    assert len(kernels.sdpa) == 1 and "is_causal" in site.after
    module.masked_bias.fill_(0.0)
    compare(module, call, grad)
    module.masked_bias = torch.tensor(-1.5)
    compare(module, call, grad)


@pytest.mark.parametrize("value", [torch.tensor(-1e9, requires_grad=True), torch.full((N, 1), -1e9)])
def test_what_is_no_such_number(value: Tensor, compiled: Any, kernels: Any) -> None:
    """A parameter, which gets a gradient; a tensor that broadcasts to the scores is one number all the same."""
    module = Attention(value)
    compare(module, compiled(module), True)
    assert not (value.requires_grad and kernels.sdpa)
