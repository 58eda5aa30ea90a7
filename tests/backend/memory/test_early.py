"""The floor under Inductor is hardly above that of the graphs as they stand: what autograd's formulas compute for the
backward alone does not hold what it is made of until the forward ends, and gradients of shared weights are added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optpass.errors import BudgetInfeasibleError


class Joined(nn.Module):
    """Of each ReLU, Inductor's formula saves the mask: its result is joined with the input, and not saved itself."""

    def __init__(self, layers: int = 8, width: int = 64, more: int = 8) -> None:
        super().__init__()
        self.layers, self.more = nn.ModuleList(nn.Linear(width + more, width) for _ in range(layers)), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            h = torch.cat([torch.relu(layer(h)), x[:, : self.more]], 1)
        return h.square().mean()


class Recurrent(nn.Module):
    """A weight that is larger than all else, used in every step: products are added to its gradient one by one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.width = nn.Linear(2 * width, width), width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], self.width)
        for now in x:
            h = torch.tanh(self.cell(torch.cat([h, now], 1)))
        return h.square().mean()


@pytest.mark.parametrize("model", [Joined, Recurrent])
def test_the_floor_is_hardly_above_that_of_the_graphs_as_they_stand(model: Any, steps: Any) -> None:
    torch.manual_seed(0)
    model, x = model(), torch.randn(1024, 72) if model is Joined else torch.randn(10, 32, 64)
    model(x).backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    floors = {}
    for inner in ("aot_eager", "inductor"):
        with pytest.raises(BudgetInfeasibleError) as caught:
            steps.run(model, [x], 1, inner=inner)
        floors[inner] = caught.value.floor_bytes
    assert floors["inductor"] <= 1.1 * floors["aot_eager"]
    ran = steps.run(model, [x], floors["inductor"], inner="inductor")
    assert ran.peak <= ran.budget and ran.error <= 0.001
    torch.testing.assert_close(list(ran.gradients.values()), wanted)
