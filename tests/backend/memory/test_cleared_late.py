"""Gradients that are cleared late: `loss = model(x); optimizer.zero_grad(); loss.backward()`."""

from __future__ import annotations

import itertools
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optpass
from optpass.backend.memory.measure import measure_peak, storage_bytes
from optpass.backend.memory.seen import late

ROWS, WIDTH, MICRO = 256, 128, 3


def network(layers=3):
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def loss_inside(model, optimizer, batch, build):
    call = build(lambda x, y: F.mse_loss(model(x), y))

    def step():
        loss = call(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def loss_outside(model, optimizer, batch, build):
    call = build(model)

    def step():
        loss = F.mse_loss(call(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def two_graphs(model, optimizer, batch, build):
    first, second = build(model[:2]), build(model[2:])

    def step():
        loss = F.mse_loss(second(first(batch[0])), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def micro_batches(model, optimizer, batch, build):
    call = build(lambda x, y: F.mse_loss(model(x), y))

    def step():
        for number, one in enumerate(zip(*(t.chunk(MICRO) for t in batch), strict=True)):
            loss = call(*one)
            if number == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()

    return step


def forwards_first(model, optimizer, batch, build):
    """As a pipeline fills: all forwards, then all backwards."""
    call = build(model)

    def step():
        losses = [F.mse_loss(call(x), y) for x, y in zip(*(t.chunk(MICRO) for t in batch), strict=True)]
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        optimizer.step()

    return step


def cleared_early(model, optimizer, batch, build):
    call = build(lambda x, y: F.mse_loss(model(x), y))

    def step():
        optimizer.zero_grad()
        call(*batch).backward()
        optimizer.step()

    return step


def left_as_zeros(model, optimizer, batch, build):
    call = build(lambda x, y: F.mse_loss(model(x), y))

    def step():
        loss = call(*batch)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    return step


def of_sizes(clear_late):
    """Steps on batches of different lengths, the loss outside."""

    def program(model, optimizer, batch, build):
        call = build(model)
        lengths = itertools.cycle((ROWS // 2, ROWS, ROWS // 2 + 32, ROWS))

        def early(x, y):
            optimizer.zero_grad()
            F.mse_loss(call(x), y).backward()

        def late(x, y):
            loss = F.mse_loss(call(x), y)
            optimizer.zero_grad()
            loss.backward()

        def step():
            length = next(lengths)
            (late if clear_late else early)(*(t[:length].clone() for t in batch))
            optimizer.step()

        return step

    return program


PROGRAMS = {p.__name__: p for p in (loss_inside, loss_outside, two_graphs, micro_batches, cleared_early, left_as_zeros)}


def trained(program, budget, steps=4):
    """The peak of so many steps from the first on, and the parameters then."""
    torch._dynamo.reset()
    optpass.reset_report()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    options = {"inner": "aot_eager", "memory_budget": budget}
    step = program(model, optimizer, batch, lambda f: torch.compile(f, backend="optpass", options=options))
    found = measure_peak(lambda: [step() for _ in range(steps)])
    peak = storage_bytes([*model.parameters(), *batch]) + found.bytes_above_start
    return peak, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_budget_holds_from_the_first_step_on(name, steps):
    top, reference = trained(PROGRAMS[name], 10**9)
    floor, peak, parameters = steps.smallest(partial(trained, PROGRAMS[name]))
    assert peak <= floor < top
    assert all(map(torch.equal, parameters, reference))
    budget = (floor + top) // 2
    peak, parameters = trained(PROGRAMS[name], budget)
    assert 0.9 * budget <= peak <= budget
    assert all(map(torch.equal, parameters, reference))


def test_gradients_on_their_way_out_are_not_counted_in_the_backward(steps):
    gradients = sum(4 * p.numel() for p in network().parameters())
    early, late = steps.smallest(partial(trained, cleared_early))[0], steps.smallest(partial(trained, loss_inside))[0]
    assert early <= late < early + gradients / 2


def test_gradients_on_their_way_out_are_known_at_other_sizes(steps):
    """Dynamo compiles the graph anew when the second step begins, beside gradients of the first."""
    gradients = sum(4 * p.numel() for p in network().parameters())
    early, _, _ = steps.smallest(partial(trained, of_sizes(clear_late=False)))
    late, peak, _ = steps.smallest(partial(trained, of_sizes(clear_late=True)))
    assert peak <= late < early + gradients


def test_nothing_is_compiled_for_gradients_that_are_on_their_way_out():
    trained(loss_inside, 10**9)
    assert len(optpass.report().graphs) == 1


def test_runs_that_wait_share_a_plan(steps):
    """Gradients of the step before are no gradients of earlier micro-batches for the second run either."""
    floor, _, _ = steps.smallest(partial(trained, forwards_first))
    top, reference = trained(forwards_first, 10**9)
    budget = floor + (top - floor) * 2 // 3
    peak, parameters = trained(forwards_first, budget)
    assert 0.95 * budget <= peak <= budget
    assert all(map(torch.equal, parameters, reference))


def test_code_is_read_a_few_times():
    """A loop that does not clear them late begins steps so for as long as it runs."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad, seen, read = torch.ones(3), late.Late(), Mock(return_value=None)
    with patch.object(late, "to_come", read):
        for _ in range(10):
            with seen.call([parameter], list) as there:
                assert there.bytes == 0
            with torch.no_grad():
                parameter.add_(1)
    assert read.call_count == late.LOOKS


def test_gradients_are_counted_anew_where_more_parameters_have_them():
    """Some were frozen for longer than gradients are counted in each step."""
    first, second, seen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5)), late.Late()

    def step(*graded):
        for p in graded:
            p.grad = torch.ones_like(p)
        with seen.call([first, second], list) as there:
            first.grad = second.grad = None
            seen.begin_backward()
        with torch.no_grad():
            first.add_(1)
        return there.bytes

    with patch.object(late, "to_come", Mock(return_value=None)):  # it is seen when they go
        found = [step(first) for _ in range(3 + late.COUNTS)]
        assert found[-1] == first.nbytes
        assert step(first, second) == first.nbytes + second.nbytes
