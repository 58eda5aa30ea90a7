"""Buffers and frozen parameters that no graph reads are on the device all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

WIDTH, ROWS = 64, 128


class Idle(nn.Module):
    """A table for longer inputs, a copy of a buffer, and a frozen head that training leaves aside."""

    def __init__(self, breaks: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4 * WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("table", torch.ones(256, WIDTH))
        self.register_buffer("alias", self.table[:2])
        self.breaks, self.reads = breaks, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.second(x)
        return (self.head(x) if self.reads else x).square().mean()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_what_no_graph_reads_is_counted_once(steps, breaks, reads):
    model, x = Idle(breaks, reads), torch.randn(ROWS, WIDTH)
    ran = steps.run(model, [x])
    assert ran.error <= 0.001
    low = steps.run(model, [x], next(steps.budgets(ran, [0.6])))
    assert low.peak <= low.budget and steps.equal(low, ran)


def test_of_a_function_the_modules_that_it_calls(steps):
    model, other = Idle(), nn.Linear(WIDTH, 32 * WIDTH)

    def program(compiled):
        def loss(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        call, x = compiled(loss), torch.randn(ROWS, WIDTH)

        def step():
            assert other is not None  # held here, and read by nobody
            call(x).backward()
            found = [p.grad for p in model.parameters()]
            model.zero_grad()
            return [g for g in found if g is not None]

        return step, (model,), (x, *model.buffers())

    peak, _, predicted, _ = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.001 * peak
