"""Compile time of several graphs under a budget: how samples are laid out and judged, and the program itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from optpass.bench import memory_graphs as bench
from optpass.bench.memory_compile import INDUCTOR
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig, load

NOISE = (1.0, 1.01, 0.99, 1.02, 0.98)


class Machine:
    """Stands for the fresh processes: compiles take `ratio` times as long with a budget."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.budgets: list[int | None] = []

    def __call__(self, target: str, arguments: Mapping[str, Any], *, environ: Mapping[str, str]) -> dict[str, float]:
        if target.endswith(":figures"):
            return {"floor": 1000.0, "unconstrained": 2000.0}
        self.budgets.append(arguments["budget"])
        noise = NOISE[(len(self.budgets) // 3) % len(NOISE)]
        return {"seconds": 10.0 * noise * (1.0 if arguments["budget"] is None else self.ratio)}


@pytest.mark.parametrize(("ratio", "passed"), [(1.3, True), (1.6, None), (2.0, False)])
def test_the_interval_decides(monkeypatch: pytest.MonkeyPatch, ratio: float, passed: bool | None) -> None:
    monkeypatch.setattr(bench, "run_isolated", machine := Machine(ratio))
    result = bench.run(BenchConfig(), NoProgress())
    assert result.passed is passed
    assert set(machine.budgets) == {None, 1500, 1800}
    assert {row.group for row in result.rows} == {"gpt in 2 graphs", "gpt in 4 graphs"}
    assert {row.case for row in result.rows} == {INDUCTOR, *map(bench.case, bench.PARTS)}
    assert f"{ratio:.2f} times Inductor's" in result.finding


def test_a_look_or_a_part_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_isolated", Machine(1.0))
    assert bench.run(BenchConfig(quick=True), NoProgress()).passed is None
    assert bench.run(BenchConfig(models=("4",)), NoProgress()).passed is None


def test_rounds_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_isolated", machine := Machine(1.0))
    bench.run(BenchConfig(budget_s=0.0), NoProgress())
    assert len(machine.budgets) == len(bench.GRAPHS) * (1 + len(bench.PARTS))


def test_what_may_be_chosen_are_numbers_of_graphs() -> None:
    assert tuple(load("memory-graphs").models()) == ("2", "4")


@pytest.mark.parametrize("graphs", bench.GRAPHS)
def test_the_model_is_broken_into_so_many_graphs(graphs: int) -> None:
    compiled: list[torch.fx.GraphModule] = []

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.manual_seed(0)
    model, inputs = bench.broken(graphs)
    torch.manual_seed(1)
    expected = model(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(torch.compile(model, backend=counting)(*inputs), expected)
    assert len(compiled) == graphs
