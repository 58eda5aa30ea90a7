"""Gradients that are set to zero, not to None: from the second step on they are there when a step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import optpass

pytestmark = pytest.mark.usefixtures("clean", "drawn")


def accumulated(to_none: Callable[[int], bool]) -> Callable[[Any], Any]:
    """Three micro-batches a step; `to_none` says of each step how it ends."""

    def program(compiled: Any) -> Any:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        batches = [torch.randn(96, 32) for _ in range(3)]
        optimizer, call, count = torch.optim.SGD(model.parameters(), lr=0.1), compiled(model), [0]

        def step() -> float:
            total = 0.0
            for batch in batches:
                loss = call(batch).square().mean()
                loss.backward()
                total += loss.item()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none(count[0]))
            count[0] += 1
            return total

        gradients = [torch.zeros_like(p) for p in model.parameters()] if not to_none(1) else []
        return step, [model], [*batches, *gradients]

    return program


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_first_steps_plan_is_not_what_a_step_needs(share: float, steps: Any) -> None:
    program = accumulated(lambda _: False)
    peak, _, predicted, _ = steps.measured(program, steps.PLENTY)
    if share < 1:
        floor = int(max(site.cost["floor_bytes"] for site in planned()))
        peak, _, predicted, _ = steps.measured(program, budget := int(floor + share * (peak - floor)))
        assert peak <= budget
    assert predicted == pytest.approx(peak, rel=0.005)
    kinds = [site.kind for site in (*optpass.report().sites(), *optpass.report().declined())]
    assert "memory budget of the first step" in kinds and "memory budget" in kinds


def test_a_plan_that_serves_again_is_in_force_again(steps: Any) -> None:
    peak, _, predicted, _ = steps.measured(accumulated(lambda step: step > 0), steps.PLENTY, 4)
    assert predicted == pytest.approx(peak, rel=0.005)
    assert len(planned()) == 2


def planned() -> list[Any]:
    report = optpass.report()
    return [site for site in (*report.sites(), *report.declined()) if site.kind == "memory budget"]
