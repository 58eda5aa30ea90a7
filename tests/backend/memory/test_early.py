"""What autograd's formulas compute for the backward alone does not hold what it is made of until the forward ends."""

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


def test_the_floor_does_not_hold_what_masks_are_made_of(steps: Any) -> None:
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(1024, 72)
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
