"""A critic that is frozen while the generator is trained: its optimizer's state and its gradients are there."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optpass
from optpass.backend.memory.measure import step_peak

ROWS, WIDTH = 192, 48


def network(outputs: int) -> nn.Sequential:
    hidden = (m for _ in range(3) for m in (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


def peaks(budget: int, steps: int = 4) -> list[int]:
    """Of each step behind the first, in which it is compiled, everything counted."""
    torch._dynamo.reset()
    optpass.reset_report()
    gc.collect()  # models of earlier calls
    torch.manual_seed(0)
    options = {"inner": "aot_eager", "strict": True, "memory_budget": budget}
    models = _, critic = nn.ModuleList([network(WIDTH), network(1)])
    generate, judge = (torch.compile(m, backend="optpass", options=options) for m in models)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in models]
    noise, real = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    made: list[torch.Tensor] = []

    def train_generator() -> None:
        critic.requires_grad_(False)
        made[:] = [generate(noise)]
        F.softplus(-judge(made[0])).mean().backward()
        optimizers[0].step()

    def train_critic() -> None:
        critic.requires_grad_(True)
        (F.softplus(-judge(real)) + F.softplus(judge(made[0].detach()))).mean().backward()
        optimizers[1].step()

    found = []
    for number in range(steps):
        for optimizer, half in zip(optimizers, (train_generator, train_critic), strict=True):
            optimizer.zero_grad()  # outside of what is measured, which sees no release of what was there before
            made[: half is train_generator] = []
            there = [noise, real, *made, *optimizers[1].state.values()]
            found.append(step_peak(models, half, optimizers[0], there).total) if number else half()
    return [max(halves) for halves in zip(found[::2], found[1::2], strict=True)]


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_each_step_behind_the_first_stays_within_the_budget(share: float) -> None:
    top = max(peaks(10**10))
    with pytest.raises(optpass.BudgetInfeasibleError) as caught:
        peaks(1, 2)
    floor = caught.value.floor_bytes
    del caught
    while True:  # what is seen of the steps may say that a floor is higher
        try:
            peaks(floor)
            break
        except optpass.BudgetInfeasibleError as error:
            assert error.floor_bytes > floor
            floor = error.floor_bytes
    budget = int(floor + share * (top - floor))
    assert 0.9 * budget <= max(peaks(budget)) <= budget
