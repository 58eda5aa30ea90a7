"""Graphs that run without gradients while others wait for their backward: a teacher, a frozen judge of outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, WIDE = 128, 32, 640


def network(width: int = WIDTH, layers: int = 4) -> nn.Sequential:
    made = (m for _ in range(layers) for m in (nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH)))
    return nn.Sequential(*made)


def judged(call):
    """A frozen net runs on outputs, which need a gradient, and on targets, which do not; before it a part of the loss
    has saved something."""
    model, judge, given, target = network(), network(WIDE, 1), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    compiled, judging = call(model), call(judge.requires_grad_(False))

    def step():
        out = compiled(given)
        (F.l1_loss(out, target) + F.mse_loss(judging(out), judging(target).detach())).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, judge), (given, target)


def taught(call):
    """A wide teacher runs between the forward of its student and the loss."""
    model, teacher, given = network(), network(WIDE).eval(), torch.randn(ROWS, WIDTH)
    compiled, teaching = call(model), call(teacher)

    def step():
        out = compiled(given)
        with torch.no_grad():
            target = teaching(given)
        F.mse_loss(out, target).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model, teacher), (given,)


@pytest.mark.parametrize("program", [judged, taught])
def test_what_runs_between_counts_too(program, steps):
    peak, results, predicted, held = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.001 * peak
    budget = int(held + 0.85 * (peak - held))
    less, same, predicted, _ = steps.measured(program, budget)
    assert less <= budget
    assert abs(predicted - less) <= 0.001 * less
    for mine, theirs in zip(results, same, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
