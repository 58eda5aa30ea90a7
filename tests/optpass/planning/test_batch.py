"""The largest micro-batch, against steps whose smallest peak is a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from optpass.errors import BudgetInfeasibleError, ConfigError
from optpass.passes import devices
from optpass.planning import batch as batches
from optpass.planning.batch import largest_batch
from optpass.planning.request import Request


@dataclass
class Step:
    """A step that needs `peak` bytes at least."""

    batch: int | None
    peak: int
    line: int

    @property
    def planner(self) -> Any:
        return SimpleNamespace(floor=self.peak, graph_floor=self.line)

    @property
    def captured(self) -> Any:
        return SimpleNamespace(batch=self.batch)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[int]]]:
    """Searches steps whose forward and backward need `line(batch)` bytes; returns the batch, and what was traced."""

    def run(line: Callable[[int], int], budget: int, least: int = 0, headroom: float = 0.0) -> tuple[int, list[int]]:
        traced: list[int] = []

        def solve(_: Request, batch: int) -> Step:
            traced.append(batch)
            return Step(batch, max(line(batch), least), line(batch))

        monkeypatch.setattr(batches, "solve", solve)
        monkeypatch.setattr(batches, "no_plan", lambda *_: BudgetInfeasibleError("no", floor_bytes=1, budget_bytes=1))
        request = Request(capture=None, device=devices.resolve("h100"), headroom=headroom)  # type: ignore[arg-type]
        found, tried = largest_batch(request, budget)
        assert [b for b, _ in tried] == sorted(traced)
        return found.captured.batch, traced

    return run


@pytest.mark.parametrize("expected", [1, 2, 3, 7, 64, 1000, 12_345])
def test_a_straight_line_takes_few_traces(search: Any, expected: int) -> None:
    found, traced = search(lambda n: 1_000_000 + 7_777 * n, 1_000_000 + 7_777 * expected + 5)
    assert found == expected and len(traced) <= 6


@pytest.mark.parametrize("expected", [5, 90, 400])
def test_a_line_with_a_bend_and_the_optimizers_step_beneath(search: Any, expected: int) -> None:
    def line(n: int) -> int:
        return 500_000 + 9_000 * n + (40 * n * n if n > 50 else 0) + (n % 3) * 100

    found, traced = search(line, line(expected) + 50, least=600_000 if line(expected) > 600_000 else 0)
    assert line(found) <= line(expected) + 50 < line(found + 1)
    assert found == expected and len(traced) <= 16


def test_not_even_one(search: Any) -> None:
    with pytest.raises(BudgetInfeasibleError):
        search(lambda n: 100 * n, 99)


@pytest.mark.parametrize("budget, expected", [(10_300, 99), (300, 2), (103, 1), (100, 1)])
def test_headroom_is_left_where_it_can_be(search: Any, budget: int, expected: int) -> None:
    assert search(lambda n: 100 * n, budget, headroom=0.03)[0] == expected


def test_a_target_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "solve", lambda *_: Step(None, 10, 10))
    with pytest.raises(ConfigError, match=r"^batch='auto'"):
        largest_batch(Request(capture=None, device=devices.resolve("h100")), 100)  # type: ignore[arg-type]
