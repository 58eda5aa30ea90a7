"""A budget in steps with several backwards of one graph, or several losses: what waits for another one is counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, CLASSES = 128, 32, 96


class Heads(nn.Module):
    """Two outputs of one body."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            part for _ in range(4) for part in (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        ]
        self.body, self.first, self.second = (
            nn.Sequential(*layers),
            nn.Linear(WIDTH, CLASSES),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return self.first(x), self.second(x)


def started(call):
    """The model, its compiled call, and a batch."""
    model = Heads()
    return model, call(model), torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))


def one_after_the_other(call):
    """Both losses keep what their operators have saved while the graph runs backward for one of them."""
    model, compiled, given, classes = started(call)

    def step():
        one, other = (F.cross_entropy(scores, classes) for scores in compiled(given))
        one.backward(retain_graph=True)
        other.backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given, classes)


def gradients_apart(call):
    """Each loss's gradients are given to the caller, who makes one of both."""
    model, compiled, given, classes = started(call)
    parameters = list(model.parameters())

    def step():
        one, other = (F.cross_entropy(scores, classes) for scores in compiled(given))
        first = torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(other, parameters, allow_unused=True)
        return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]

    return step, (model,), (given, classes)


@pytest.mark.parametrize("program", [one_after_the_other, gradients_apart])
def test_what_waits_for_another_backward_is_counted(steps, program):
    """Operators' saved tensors were taken to go with the first backward, and gradients that it gave to nobody's
    parameter to be no part of the second: 6 to 13% over the budget."""
    peak, results, predicted, _ = steps.measured(program, 10**10, steps=4)
    assert peak <= predicted <= 1.15 * peak  # the most of both backwards, which do not have all at once
    for share in (0.75, 0.9):
        budget = int(share * predicted)
        less, same, _, _ = steps.measured(program, budget, steps=4)
        assert less <= budget
        assert all(torch.equal(a, b) for a, b in zip(results[-1], same[-1], strict=True))


def of_two_models(call):
    """The second loss waits for its turn while the first one's graph runs backward."""
    models = Heads(), Heads()
    (first, second), given, classes = map(call, models), torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))

    def step():
        one = F.cross_entropy(first(given)[0], classes)
        other = F.cross_entropy(second(given)[0], classes)
        one.backward()
        other.backward()
        found = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        for model in models:
            model.zero_grad()
        return found

    return step, models, (given, classes)


def test_another_loss_that_waits_is_counted_once(steps):
    peak, results, predicted, _ = steps.measured(of_two_models, 10**10, steps=3)
    assert peak <= predicted <= 1.005 * peak
    for share in (0.8, 0.9):
        less, same, said, _ = steps.measured(of_two_models, int(share * peak), steps=4)
        assert less <= share * peak and less <= said <= 1.005 * less
        assert all(torch.equal(a, b) for a, b in zip(results[-1], same[-1], strict=True))
