"""Whether an optimizer has stepped: fused ones count up no versions."""

from __future__ import annotations

import torch
from torch import nn

from optpass.backend.memory.versions import FusedSteps


def test_steps_of_fused_optimizers_are_counted():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], 0.1, fused=fused) for p, fused in zip(parameters, (True, False), strict=True)]
    counted = FusedSteps()
    for _ in range(2):
        counted.follow(optimizers)  # once
    for p, optimizer in zip(parameters, optimizers, strict=True):
        p.grad = torch.ones(2)
        optimizer.step()
    assert [counted.of(p) for p in parameters] == [1, 0]


class Wrapper(torch.optim.Optimizer):
    """Hands everything on, and is not made as torch makes optimizers."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups


def test_wrappers_that_take_no_hooks_are_left_alone():
    parameter, counted = nn.Parameter(torch.ones(2)), FusedSteps()
    inner = torch.optim.SGD([parameter], 0.1, fused=True)
    counted.follow([Wrapper(inner), inner])
    parameter.grad = torch.ones(2)
    inner.step()
    assert counted.of(parameter) == 1
