"""A graph that runs several times before one loss of all its runs: the loss is there in one situation of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optpass.backend.memory.plans.bounds import Bound, Choice, excess, total

ROWS, WIDTH = 96, 48


def two_views(call):
    """As SimCLR trains: a loss of all pairs, which needs more than the network."""
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))))
    compiled, given = call(model), torch.randn(ROWS, WIDTH)
    hidden, classes = torch.eye(2 * ROWS, dtype=torch.bool), torch.arange(2 * ROWS).roll(ROWS)

    def step():
        views = [F.normalize(compiled(given * scale), dim=1) for scale in (0.9, 1.1)]
        joined = torch.cat(views)
        F.cross_entropy((joined @ joined.T / 0.5).masked_fill(hidden, -1e9), classes).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), (given, hidden, classes)


def test_a_loss_of_two_runs_is_over_when_the_first_run_goes_backward(steps):
    peak, results, predicted, held = steps.measured(two_views, 10**10)
    assert abs(predicted - peak) <= 0.001 * peak
    for share in (0.6, 0.55):
        budget = int(held + share * (peak - held))
        less, same, predicted, _ = steps.measured(two_views, budget)
        assert 0.95 * budget <= less <= budget
        assert abs(predicted - less) <= 0.001 * less
        for mine, theirs in zip(results, same, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def pipeline(backwards):
    """All forwards and then all backwards, in an order; each loss is a number in a storage as large as its output.
    Most is there while the last loss runs forward, beside gradients that are cleared behind it."""

    def program(call):
        model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        compiled, given, target = call(model), torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step():
            losses = [F.mse_loss(compiled(x), y) for x, y in zip(given.chunk(4), target.chunk(4), strict=True)]
            optimizer.zero_grad()
            for loss in backwards(losses):
                loss.backward()
            optimizer.step()

        return step, (model,), (given, target)

    return program


@pytest.mark.parametrize("backwards", [list, reversed], ids=["first", "last"])
def test_what_was_made_before_the_last_run_is_there_in_its_loss(backwards, steps):
    peak, _, predicted, held = steps.measured(pipeline(backwards), 10**10)
    gradients = held - 2 * 4 * 4 * ROWS * WIDTH  # as many as there are parameters: the step begins with them
    assert abs(predicted - peak - gradients) <= 0.002 * peak


class Wide(nn.Module):
    """Of large weights, and more in its forward than in its backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * ROWS), nn.Tanh(), nn.Linear(4 * ROWS, WIDTH))

    def forward(self, x):
        return self.layers(x) + x.detach().repeat(1, 512).square().mean(-1, keepdim=True)


def recurrent(call):
    """A cell whose runs all wait before one loss."""
    cell, given = Wide(), torch.randn(8, WIDTH)
    compiled = call(cell)

    def step():
        hidden = given
        for _ in range(5):
            hidden = compiled(hidden)
        hidden.square().mean().backward()
        cell.zero_grad()

    return step, (cell,), (given,)


def test_sums_of_gradients_that_wait_are_not_there_in_the_forward(steps):
    peak, _, predicted, _ = steps.measured(recurrent, 10**10, steps=2)
    assert abs(predicted - peak) <= 0.005 * peak


def test_a_bound_counts_its_own_loss():
    plan = Choice(peak=30, held=10, seconds=0.0, later=4)
    assert Bound(0, (), 5, 100).needed(plan) == 30
    assert Bound(0, (), 5, 100, loss=(25, 0)).needed(plan) == 35
    assert Bound(0, (), 5, 100, loss=(0, 40)).needed(plan) == 44
    bounds = [Bound(0, ((0, 1),), 0, 100, loss=(0, 90)), Bound(0, (), 20, 60)]
    assert [total([plan], bound) for bound in bounds] == [104, 50]
    assert excess([plan], bounds) == 4
