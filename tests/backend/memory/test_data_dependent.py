"""Graphs in which data decides: which branch of `torch.cond` runs, and how many rows a mask leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("clean", "drawn")
INNERS = pytest.mark.parametrize("inner", ["aot_eager", "inductor"])


@pytest.fixture
def captured() -> Iterator[None]:
    """Sizes that depend on data are part of graphs."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def stack(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))
    )


class Branches(nn.Module):
    """The second branch needs more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(32, 32), stack(32, 1), stack(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cond(x.sum() > 0, self.one, self.other, (x,))).square().mean()


class SomeRows(nn.Module):
    """All rows are left."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = stack(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x[x[:, 0] > -99.0]).square().mean()


class Experts(nn.Module):
    """Each row goes to one of four; they are planned as if all rows went to each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(stack(32, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, result = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number)[:, 0]
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return result.square().mean()


class FewerThanSaid(nn.Module):
    """The first rows, as many as a tensor says, which is all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = stack(32, 2)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        rows = count.item()
        torch._check(rows >= 2)
        torch._check(rows <= 192)
        return self.stack(x[:rows] * 1.0).square().mean()


class AsManyAsSaid(nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        rows = count.item()
        torch._check(rows >= 0)
        return (x.sum() * torch.ones(rows)).square().mean()


@pytest.mark.slow
@INNERS
def test_the_larger_branch_counts(inner: str, steps: Any) -> None:
    model = Branches()
    more, less = -torch.rand(192, 32), torch.rand(192, 32)
    reference = steps.run(model, (more,), inner=inner)
    assert reference.error <= 0.005
    (budget,) = steps.budgets(reference, (0.4,))
    for data in (more, less) if inner == "aot_eager" else (more,):  # one graph, of which Inductor makes the same
        ran = steps.run(model, (data,), budget, inner=inner)
        assert ran.peak <= budget and ran.recomputed
        if inner == "aot_eager":
            assert steps.same(ran.gradients, steps.run(model, (data,), inner=inner, measure=False).gradients)


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("rows", ["masked", "read"])
@INNERS
def test_sizes_count_as_what_they_can_be(inner: str, rows: str, steps: Any, captured: None) -> None:
    data = torch.randn(192, 32)
    model, given = (SomeRows(), (data,)) if rows == "masked" else (FewerThanSaid(), (data, torch.tensor(192)))
    reference = steps.run(model, given, inner=inner)
    assert reference.error <= 0.005  # for all rows are left
    if (inner, rows) == ("inductor", "read"):
        return  # Inductor takes no buffer for another whose size is read: no plan needs less, to speak of
    (budget,) = steps.budgets(reference, (0.4,))
    ran = steps.run(model, given, budget, inner=inner)
    assert ran.peak <= budget and ran.error <= 0.005 and ran.recomputed


@pytest.mark.slow
def test_experts_fit(steps: Any, captured: None) -> None:
    model, data = Experts(), torch.randn(192, 32)
    reference = steps.run(model, (data,))
    assert reference.peak <= reference.figure("predicted_peak_bytes")
    (budget,) = steps.budgets(reference, (0.1,))
    ran = steps.run(model, (data,), budget)
    assert ran.peak <= budget
    assert steps.equal(ran, reference)


def test_what_nothing_bounds_is_refused(steps: Any, captured: None) -> None:
    data = torch.randn(8, requires_grad=True)
    with pytest.raises(
        Exception, match=r"ConfigError: options: memory_budget=\d+: the memory of this step cannot be planned"
    ):
        steps.run(AsManyAsSaid(), (data, torch.tensor(5)))
