"""The smallest peak that an error names is one that a budget can name, where the loss was not seen yet."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optpass

ROWS, WIDTH, CLASSES = 256, 48, 12


class Hidden(nn.Module):
    """Scores, and all hidden states beside them, as models return with `output_hidden_states`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        states = []
        for layer in self.layers:
            x = x + F.gelu(layer(x))
            states.append(x)
        return self.head(x), states


def first_call(budget: int) -> None:
    torch._dynamo.reset()
    optpass.reset_report()
    torch.manual_seed(0)
    options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": budget, "strict": True}
    torch.compile(Hidden(), backend="optpass", options=options)(torch.randn(ROWS, WIDTH))


def test_hidden_states_beside_the_scores() -> None:
    with pytest.raises(optpass.BudgetInfeasibleError) as refused:
        first_call(1000)
    floor = refused.value.floor_bytes
    del refused
    first_call(floor)
    with pytest.raises(optpass.BudgetInfeasibleError) as refused:
        first_call(floor - 1)
    assert refused.value.floor_bytes == floor
