"""Models that no graph trains, and tensors that the program changes by hand, are there in a step: they count."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optpass
from optpass.backend.memory.elsewhere import frozen_models
from optpass.backend.memory.measure import step_peak
from optpass.errors import BudgetInfeasibleError

ROWS, WIDTH, LAYERS = 192, 64, 4


def network():
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def batch():
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def trained(model, budget, forward, held, after=lambda: None, steps=5):
    """Peaks of the steps behind the first, with what is `held`, and what is predicted for the last."""
    torch._dynamo.reset()
    optpass.reset_report()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="optpass", options={"inner": "aot_eager", "memory_budget": budget})
    peaks = []
    for _ in range(steps):
        inputs = batch()
        optimizer.zero_grad()

        def step(inputs=inputs):
            forward(compiled, *inputs).backward()
            optimizer.step()
            after()

        peaks.append(step_peak(model, step, optimizer, [inputs, held()]).total)
    report = optpass.report()
    filed = [*report.sites("memory budget"), *report.declined("memory budget")]
    return peaks[1:], max(site.cost["predicted_peak_bytes"] for site in filed)


def floor(make):
    """The smallest budget that is not refused."""
    budget = 1
    while True:
        try:
            trained(*make(budget))
            return budget
        except BudgetInfeasibleError as error:
            assert error.floor_bytes > budget
            budget = error.floor_bytes


def plain(compiled, x, target):
    return F.mse_loss(compiled(x), target)


def taught(budget):
    model, teacher = network(), network().requires_grad_(False)

    def forward(compiled, x, _):
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(compiled(x), wanted)

    return model, budget, forward, lambda: list(teacher.parameters())


def averaged(budget):
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    held = lambda: [*average.parameters(), *average.buffers()]  # noqa: E731
    return model, budget, plain, held, lambda: average.update_parameters(model)


def averaged_by_hand(budget):
    model = network()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def after():
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.1)

    return model, budget, plain, lambda: list(average.values()), after


def averaged_through_data(budget):
    model = network()
    average = copy.deepcopy(model)

    def after():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    return model, budget, plain, lambda: list(average.parameters()), after


@pytest.mark.parametrize("make", [taught, averaged, averaged_by_hand, averaged_through_data])
def test_they_count(make):
    least = floor(make)
    most, _ = trained(*make(10**9))
    for part in (0.0, 0.5):
        budget = int(least + part * (most[-1] - least))
        peaks, predicted = trained(*make(budget))
        assert max(peaks) <= budget
        assert abs(predicted - peaks[-1]) <= 0.005 * peaks[-1]


def test_momenta_by_hand_count_once_they_have_been_made_and_changed():
    def make(budget):
        model = network()
        momenta = [torch.zeros_like(p) for p in model.parameters()]

        def after():
            with torch.no_grad():
                for momentum, p in zip(momenta, model.parameters(), strict=True):
                    momentum.mul_(0.9).add_(p.grad)

        return model, budget, plain, lambda: momenta, after

    unconstrained, _ = trained(*make(10**9))
    budget = int(0.9 * unconstrained[-1])
    assert max(trained(*make(budget))[0][1:]) <= budget


def test_what_another_optimizer_trains_does_not():
    model, other = network(), network()
    optimizer = torch.optim.AdamW(other.parameters())

    def after():
        F.mse_loss(other(batch()[0]), batch()[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    _, alone = trained(network(), 10**9, plain, list)
    _, beside = trained(model, 10**9, plain, list, after)
    assert beside == alone


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)


def test_frozen_models_are_found():
    model, teacher = network(), network().requires_grad_(False)
    found = {id(t) for t in frozen_models(list(model.parameters()))}
    assert {id(p) for p in teacher.parameters()} <= found
    assert not {id(p) for p in model.parameters()} & found


def test_beside_what_is_read_the_frozen_parts_of_what_holds_it():
    trainer = Trainer()
    found = {id(t) for t in frozen_models(list(trainer.student.parameters()))}
    assert {id(p) for p in trainer.teacher.parameters()} <= found
    assert not {id(p) for p in trainer.student.parameters()} & found
    other = network()
    assert not {id(p) for p in trainer.teacher.parameters()} & {
        id(t) for t in frozen_models(list(other.parameters()))
    }  # it is part of what somebody else trains


def test_averages_are_found_and_what_shares_memory_is_not():
    model = network()
    average = AveragedModel(model)
    tied = network()
    for mine, theirs in zip(tied.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    tied.requires_grad_(False)
    found = {id(t) for t in frozen_models(list(model.parameters()))}
    assert {id(p) for p in average.parameters()} <= found
    assert not {id(p) for p in tied.parameters()} & found


def test_modules_that_are_being_made_stop_nothing():
    half = nn.Module.__new__(nn.Module)
    lazy = nn.LazyLinear(8)
    found = frozen_models([torch.zeros(1)])
    assert all(t is not p for t in found for p in lazy.parameters())
    assert trained(network(), 10**9, plain, list)
    assert half is not None
