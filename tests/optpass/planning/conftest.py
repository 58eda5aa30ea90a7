"""Steps captured once for all tests of planning: tracing is what takes the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optpass import api
from optpass.passes import devices
from optpass.planning.plan import Solved, solve
from optpass.planning.prepare import Prepared
from optpass.planning.request import Captured, Request


class Chain(nn.Module):
    """Layers of one width in a list, each with a tensor that is cheap to make again."""

    def __init__(self, width: int = 64, depth: int = 6, breaks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(24, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("scale", torch.full((7,), 0.5))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(self.embed(x), 0)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.half(x, 1)

    def half(self, x: torch.Tensor, which: int) -> torch.Tensor:
        middle = len(self.blocks) // 2
        for block in self.blocks[middle:] if which else self.blocks[:middle]:
            x = torch.sin(block(x)) * self.scale[0]
        return x


def capturer(model: nn.Module, *inputs: torch.Tensor, loss: Any = None) -> Any:
    """The `capture` of a request for a model object."""

    def capture(batch: int | None, prepare: Prepared) -> Captured:
        own = inputs if batch is None else tuple(torch.randn(batch, *t.shape[1:]) for t in inputs)
        target = api.given_target(model, own, None, None)
        found, notes = api.captured(target, True, loss, joint=True, prepare=prepare)
        return Captured("chain", found, own[0].shape[0], tuple(notes))

    return capture


@pytest.fixture(scope="package")
def chain() -> Chain:
    return Chain()


@pytest.fixture(scope="package")
def request_for_chain(chain: Chain) -> Request:
    return Request(capture=capturer(chain, torch.randn(512, 24)), device=devices.resolve("h100"), optimizer="adamw")


@pytest.fixture(scope="package")
def solved(request_for_chain: Request) -> Solved:
    return solve(request_for_chain, None)


@pytest.fixture(scope="package")
def solved_in_two() -> Solved:
    """The same step as two graphs."""
    model = Chain(breaks=True)
    request = Request(capture=capturer(model, torch.randn(512, 24)), device=devices.resolve("h100"), optimizer="adamw")
    return solve(request, None)


@pytest.fixture(scope="package")
def capture_of() -> Any:
    """`capturer`, for tests that need a request of their own."""
    return capturer


@pytest.fixture(scope="package")
def chain_class() -> type[Chain]:
    return Chain
