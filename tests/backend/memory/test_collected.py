"""Outputs that the caller collects over the micro-batches of a step are there beside those that follow."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optpass
from optpass.backend.memory.planned import Planned
from optpass.errors import BudgetInfeasibleError

ROWS, WIDTH, CLASSES = 96, 32, 64


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, target):
        for layer in self.layers:
            x = F.gelu(layer(x))
        logits = self.head(x)
        return F.cross_entropy(logits, target), logits, x


def detached(loss, *others):
    return [loss.detach(), *(o.detach() for o in others)]


def with_graph(loss, *others):
    return {"loss": loss, "others": others}


def number(loss, *others):
    return loss.item()


def in_micro_batches(times, keep):
    def step(call, inputs):
        found = []
        for _ in range(times):
            loss, *others = call(*inputs)
            loss.backward()
            found.append(keep(loss, *others))

    return step


@pytest.fixture
def inputs():
    return [torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))]


def made(inputs):
    torch.manual_seed(0)
    return Network(), inputs


@pytest.mark.parametrize("keep", [detached, with_graph, number])
@pytest.mark.parametrize("times", [2, 4])
def test_they_count(keep, times, inputs, steps):
    step = in_micro_batches(times, keep)
    reference = steps.run(*made(inputs), step=step)
    assert reference.error < 0.001
    for budget in steps.budgets(reference, (0.1, 0.6)):
        ran = steps.run(*made(inputs), budget, step=step)
        assert ran.peak <= budget
        assert ran.error < 0.001
        assert steps.equal(ran, reference)


def test_a_plan_for_the_second_micro_batch_knows_them(inputs, steps):
    """They are in the floor that is named when it is compiled, before it runs; the first one, variables of the caller's
    hold too, which are for the next one's results."""
    floors = [
        steps.run(*made(inputs), step=in_micro_batches(2, keep)).figure("floor_bytes") for keep in (number, detached)
    ]
    outputs = 4 * (1 + ROWS * CLASSES + ROWS * WIDTH)
    assert floors[1] - floors[0] == pytest.approx(outputs, abs=64)
    with pytest.raises(BudgetInfeasibleError, match="no plan of this training step fits"):
        steps.run(*made(inputs), (floors[0] + floors[1]) // 2, step=in_micro_batches(2, detached))


@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_collected_from_step_to_step_does_not(to_none, inputs, steps):
    """It only grows: no plan could hold."""
    model, _ = made(inputs)
    budget = 2 * steps.run(*made(inputs), step=in_micro_batches(1, number)).peak
    options = {"inner": "aot_eager", "memory_budget": budget, "strict": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="optpass", options=options)
    history = []
    for _ in range(2 * budget // (ROWS * CLASSES * 4)):
        loss, *others = compiled(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        history.append(detached(loss, *others))
    assert not any("planned together" in text for text in optpass.report().warnings)


def test_a_plan_that_cannot_be_had_holds_nothing_of_its_call(monkeypatch):
    """What served before serves on; frames of the compile that failed hold each other, and the call's tensors."""
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "optimizer": "none", "memory_budget": 10**9}
    layer = nn.Linear(WIDTH, WIDTH)
    compiled = torch.compile(layer, backend="optpass", options=options)
    compiled(torch.randn(ROWS, WIDTH)).sum().backward()

    def cannot(*_):
        def failed(*args):
            frames = [args]
            frames.append(frames)
            raise BudgetInfeasibleError("no plan fits", floor_bytes=2, budget_bytes=1)

        return failed

    def goes_back(planned, *_):
        planned._served = planned._compiled
        return True

    monkeypatch.setattr(Planned, "_has_stood", lambda _: True)
    monkeypatch.setattr(Planned, "_other", cannot)
    monkeypatch.setattr(Planned, "_goes_back", goes_back)
    given = torch.randn(ROWS, WIDTH)
    there = weakref.ref(given.untyped_storage())
    gc.disable()
    try:
        torch.testing.assert_close(compiled(given), layer(given))
        del given
        assert there() is None
    finally:
        gc.enable()
