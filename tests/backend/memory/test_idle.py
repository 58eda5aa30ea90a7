"""Parameters of the model that a step does not train: their own bytes count, no gradient's and no optimizer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import optpass
from optpass.backend.memory.measure import step_peak
from optpass.errors import BudgetInfeasibleError

pytestmark = pytest.mark.usefixtures("clean")
WIDTH, ROWS = 128, 256
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW, "Adagrad": torch.optim.Adagrad, "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}  # fmt: skip


def stack(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))


class Unread(nn.Module):
    """The second head is not called."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.other = stack(3), stack(2), stack(6)
        self.register_buffer("table", torch.ones(512, WIDTH))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class Broken(Unread):
    def __init__(self) -> None:
        super().__init__(breaks=True)


class Untrained(nn.Module):
    """No gradient reaches the first layers, though they would take one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = stack(6), stack(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.body(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class Detached(Untrained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).detach()).square().mean()  # type: ignore[no-any-return]


class Heads(nn.Module):
    """A task after the other is trained; what the optimizer keeps grows until each had its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = stack(3), nn.ModuleList(stack(3) for _ in range(3))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](self.body(x)).square().mean()  # type: ignore[no-any-return]


def peaks(
    model: nn.Module,
    optimizer: str | None,
    budget: int,
    given: Callable[[int], tuple[Any, ...]],
    steps: int = 3,
    micro: int = 1,
) -> tuple[list[int], int]:
    """Measured peak of each step, and the last that was predicted."""
    torch._dynamo.reset()
    optpass.reset_report()
    updates = OPTIMIZERS[optimizer](model.parameters()) if optimizer else None
    options = {"inner": "aot_eager", "strict": True, "memory_budget": budget, "optimizer": None if updates else "none"}
    call = torch.compile(model, backend="optpass", options={k: v for k, v in options.items() if v is not None})
    found = []
    for number in range(steps):
        model.zero_grad()

        def step(inputs: tuple[Any, ...] = given(number)) -> None:
            for _ in range(micro):
                call(*inputs).backward()
            if updates is not None:
                updates.step()

        found.append(step_peak(model, step, updates, given(number)).total)
    report = optpass.report()
    said = [site.cost for site in (*report.sites(), *report.declined()) if site.kind == "memory budget"]
    return found, int(max(cost["predicted_peak_bytes"] for cost in said))


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize("kind", [Unread, Untrained, Detached])
def test_what_is_not_trained_counts_once(kind: type[nn.Module], optimizer: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    most, predicted = peaks(kind(), optimizer, 10**10, lambda _: (x,))
    assert abs(predicted - most[-1]) <= 0.001 * most[-1]
    with pytest.raises(BudgetInfeasibleError) as caught:
        peaks(kind(), optimizer, 1, lambda _: (x,))
    floor = caught.value.floor_bytes
    low, predicted = peaks(kind(), optimizer, floor, lambda _: (x,))
    assert max(low) <= floor and predicted <= floor
    if kind is not Untrained or optimizer is None:  # whose peak may be the optimizer's, which no plan changes
        assert floor < most[-1]


@pytest.mark.parametrize("optimizer", [None, "AdamW"])
def test_beside_gradients_of_earlier_micro_batches_too(optimizer: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    most, predicted = peaks(Unread(), optimizer, 10**10, lambda _: (x,), micro=2)
    assert abs(predicted - most[-1]) <= 0.001 * most[-1]
    budget = int(0.9 * most[-1])
    low, predicted = peaks(Unread(), optimizer, budget, lambda _: (x,), micro=2)
    assert max(low) <= budget and predicted <= budget


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_graphs_that_follow_may_not_train_it_either(optimizer: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    most, _ = peaks(Broken(), optimizer, 10**10, lambda _: (x,))
    budget = int(0.9 * most[-1])
    low, predicted = peaks(Broken(), optimizer, budget, lambda _: (x,), steps=4)
    assert low[-1] <= budget and abs(predicted - low[-1]) <= 0.06 * low[-1]


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "SGD"])
def test_what_another_step_trains_counts_from_then_on(optimizer: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    most, _ = peaks(Heads(), optimizer, 10**10, lambda n: (x, n % 3), steps=7)
    budget = int(0.97 * most[-1])
    low, _ = peaks(Heads(), optimizer, budget, lambda n: (x, n % 3), steps=9)
    assert max(low) <= budget
