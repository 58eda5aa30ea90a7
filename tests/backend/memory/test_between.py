"""Eager code between two graphs of a step: what it holds, and what it needs while it runs backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import optpass

ROWS, WIDTH = 192, 32


def layers(number: int) -> nn.Sequential:
    made = (m for _ in range(number) for m in (nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)))
    return nn.Sequential(*made)


def plain(middle: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return middle(x)


def whole(middle: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(middle, x, use_reentrant=False)


def in_parts(middle: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(middle, 3, x, use_reentrant=False)


class Broken(nn.Module):
    """Two graphs around a part that Dynamo leaves alone."""

    def __init__(self, way) -> None:
        super().__init__()
        self.before, self.middle, self.behind = layers(1), layers(3), nn.Linear(WIDTH, 10)
        self.way = torch.compiler.disable(way)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = self.way(self.middle, self.before(x))
        return F.cross_entropy(self.behind(F.dropout(x, 0.1)), classes)


@pytest.mark.parametrize("way", [plain, whole, in_parts])
def test_eager_code_between_graphs_counts(way, steps):
    def program(call):
        model, given, classes = Broken(way), torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
        compiled = call(model)

        def step():
            torch.manual_seed(1)
            compiled(given, classes).backward()
            found = [p.grad for p in model.parameters()]
            model.zero_grad()
            return found

        return step, (model,), (given, classes)

    peak, results, predicted, held = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.005 * peak
    report = optpass.report()
    said = [site.cost for site in (*report.sites(), *report.declined()) if site.kind == "memory budget"]
    with pytest.raises(optpass.BudgetInfeasibleError):
        steps.measured(program, int(0.97 * max(cost["floor_bytes"] for cost in said)))
    less, same, predicted, _ = steps.measured(program, int(peak - 0.03 * (peak - held)))
    assert less <= peak - 0.03 * (peak - held) and abs(predicted - less) <= 0.005 * less
    for mine, theirs in zip(results, same, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
