"""What operators of a loss outside of the graph allocate inside their backward, where that decides the peak."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, OUTPUTS = 128, 32, 128


def ranked(outputs, target, number):
    """A quotient with two gradients, of outputs over their norms."""
    one, near, far = (F.normalize(part) for part in outputs.chunk(3))
    return F.triplet_margin_loss(one, near, far) + 0 * number


def scaled(outputs, target, number):
    """A gradient that is added up from one as large as the outputs, of a number."""
    return F.binary_cross_entropy_with_logits(outputs * number, target)


def shifted(outputs, target, number):
    return F.softplus(outputs - number).mean()


def weighed(outputs, target, number):
    """Positives that weigh otherwise."""
    return F.binary_cross_entropy_with_logits(outputs * number, target, pos_weight=target[0])


def cumulated(outputs, target, number):
    return -(0.5 * (1 + torch.erf(outputs))).clamp(min=1e-6).log().mean() * number


@pytest.mark.parametrize("loss", [ranked, scaled, shifted, weighed, cumulated])
def test_what_is_inside_is_counted(loss, steps):
    def program(call):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, OUTPUTS))
        number = nn.ParameterList([nn.Parameter(torch.ones(()))])
        compiled, given, target = call(model), torch.randn(3 * ROWS, WIDTH), torch.rand(3 * ROWS, OUTPUTS)

        def step():
            held = target  # as a program holds it that reads a batch
            loss(compiled(given), held, number[0]).backward()
            found = [p.grad for p in (*model.parameters(), *number)]
            model.zero_grad()
            number.zero_grad()
            return found

        return step, (model, number), (given, target)

    peak, _, predicted, _ = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.01 * peak
