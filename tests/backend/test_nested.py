"""Nested tensors: sequences of different lengths in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optpass

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("options", [{}, {"memory_budget": "64MiB"}], ids=["without a budget", "with one"])
def test_a_step_over_nested_tensors(options: dict[str, Any]) -> None:
    """As aot_eager's; a budget is declined with the reason."""
    model = nn.Sequential(Block(), Block())

    def gradients(call: Any) -> list[torch.Tensor]:
        found = []
        for step in range(3):
            torch.manual_seed(step)
            parts = [torch.randn(length + step, WIDTH) for length in (5, 9, 17)]
            x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
            model.zero_grad()
            call(x).values().square().sum().backward()
            found += [p.grad for p in model.parameters() if p.grad is not None] + [x.grad.values()]
        return found

    ours = gradients(torch.compile(model, backend="optpass", options={"inner": "aot_eager"} | options))
    report = optpass.report()
    torch._dynamo.reset()
    theirs = gradients(torch.compile(model, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert bool([text for text in report.warnings if "nested tensors" in text]) == bool(options)
    assert not [record.error for graph in report.graphs for record in graph.passes if record.error]
    assert all(graph.totals.flops > 0 for graph in report.graphs)
