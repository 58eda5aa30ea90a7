"""What a step holds throughout: counted from tensors, real or fake, each storage once."""

from __future__ import annotations

import torch
from torch import nn

from optpass.passes import devices
from optpass.passes.memory.optimizers.optimizers import OptimizerCost
from optpass.planning.step import bytes_of, granularity, state_of

COST = OptimizerCost("adamw", 800, 90)


def test_tied_parameters_and_views_count_once() -> None:
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    model.register_buffer("mask", torch.zeros(20))
    model.register_buffer("part", model.mask[:5])
    model.kept = torch.zeros(3)  # a tensor that is no buffer takes memory all the same
    state = state_of(model, (torch.zeros(4, 10), [torch.zeros(6)]), COST, unit=1)
    assert (state.parameters, state.gradients, state.buffers, state.inputs) == (400, 400, 92, 184)


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Linear(10, 10)
    model.weight.requires_grad_(False)
    state = state_of(model, (), COST, unit=1)
    assert state.gradients == 40 and [p.shape for p in state.trained] == [(10,)]


def test_gradients_are_there_from_the_start_only_with_accumulation() -> None:
    model = nn.Linear(10, 10)
    once, twice = (state_of(model, (), COST, unit=1, accumulation=n) for n in (1, 2))
    assert once.statics().gradients == 0 and twice.statics().gradients == 440
    assert once.at_optimizer(7) == twice.at_optimizer(7)
    assert once.at_optimizer(7).total == 440 + 440 + 800 + 7 + 90


def test_a_gpu_rounds_up() -> None:
    assert granularity(devices.resolve("h100")) == 512 and granularity(devices.resolve("cpu")) == 1
    assert bytes_of([torch.zeros(1), torch.zeros(129)], 512) == 512 + 1024
    assert bytes_of([torch.zeros(1), torch.zeros(129)], 1) == 4 + 516
