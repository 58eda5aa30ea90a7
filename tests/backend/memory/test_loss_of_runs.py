"""A graph that runs several times before one loss of all its runs: the loss is there in one situation of them."""

from __future__ import annotations

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


def test_a_bound_counts_its_own_loss():
    plan = Choice(peak=30, held=10, seconds=0.0, later=4)
    assert Bound(0, (), 5, 100).needed(plan) == 30
    assert Bound(0, (), 5, 100, loss=(25, 0)).needed(plan) == 35
    assert Bound(0, (), 5, 100, loss=(0, 40)).needed(plan) == 44
    bounds = [Bound(0, ((0, 1),), 0, 100, loss=(0, 90)), Bound(0, (), 20, 60)]
    assert [total([plan], bound) for bound in bounds] == [104, 50]
    assert excess([plan], bounds) == 4
