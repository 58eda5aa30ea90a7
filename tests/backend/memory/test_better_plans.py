"""A step that fits is planned anew where that uses the budget better; where no such plan can be had, it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optpass.backend.memory.together import together
from optpass.errors import BudgetInfeasibleError

ROWS, WIDTH = 64, 32


def views(call):
    """Several runs of one graph wait for their backward, so that the first plan holds least."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                            for _ in range(4)))  # fmt: skip
    compiled, given = call(model), [torch.randn(ROWS, WIDTH) for _ in range(3)]

    def step():
        first, *others = (compiled(one) for one in given)
        sum((first - other).square().mean() for other in others).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    return step, (model,), given


@pytest.fixture
def no_better_plan(monkeypatch):
    """What a graph may use in a step that was seen is less than any plan needs."""
    shares, share_of = [], together._share

    def share(step, index, chosen):
        found = share_of(step, index, chosen)
        shares.append(found)
        beside = step.leaves[index].partitioner.budget.bytes
        return replace(found, statics=replace(found.statics, inputs=found.statics.inputs + beside))

    monkeypatch.setattr(together, "_share", share)
    return shares


def test_the_plan_in_force_serves_on(steps, no_better_plan):
    peak, expected, _, held = steps.measured(views, 10**10)
    budget = int(held + 0.5 * (peak - held))
    less, results, predicted, _ = steps.measured(views, budget, steps=4)
    assert no_better_plan  # one was looked for
    assert less <= budget and predicted <= budget
    assert all(torch.equal(a, b) for a, b in zip(expected[-1], results[-1], strict=True))


def test_a_step_that_does_not_fit_is_refused(steps, no_better_plan, monkeypatch):
    peak, _, _, held = steps.measured(views, 10**10)
    monkeypatch.setattr(together, "_fits", lambda step, index, chosen: False)
    with pytest.raises(BudgetInfeasibleError):
        steps.measured(views, int(held + 0.5 * (peak - held)), steps=4)
