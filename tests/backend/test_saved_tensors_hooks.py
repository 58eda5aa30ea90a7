"""Compiling inside of the user's `saved_tensors_hooks`, as an activation checkpoint around a compiled function does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from optpass.backend.reporting import build_report

#: Swapped attention, whose kernel saves tensors; a plan, which looks at what autograd has saved; both.
OPTIONS: list[dict[str, Any]] = [
    {"attention": "always"},
    {"attention": "off", "memory_budget": "1MiB"},
    {"attention": "always", "memory_budget": "1MiB"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.query(x) @ x.mT / 8**0.5).softmax(-1) @ x


def compiled(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return torch.compile(Block(), backend="optpass", options={"inner": "aot_eager", "strict": True, **options})


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoints_around_a_compiled_block(options: dict[str, Any], drawn: int) -> None:
    """A checkpoint counts what is saved, in the forward and again; and gives out what it has packed only once."""
    start = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(drawn))
    grads = []
    for block in (compiled(options), compiled(options)._orig_mod):
        for _ in range(2):
            x = start.clone().requires_grad_()
            inner = checkpoint(block, x, use_reentrant=False)
            checkpoint(block, inner, use_reentrant=False).square().sum().backward()
        grads.append([x.grad, block.query.weight.grad])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert bool(build_report().sites("attention")) == (options["attention"] == "always")


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_hooks_see_what_is_saved_and_nothing_else(options: dict[str, Any]) -> None:
    seen: list[type] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(type(tensor))
        return tensor

    x = torch.randn(2, 3, 20, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(options)(x).sum().backward()
    assert set(seen) <= {torch.Tensor, nn.Parameter}
