"""Budgets over all models: verdicts on figures we choose, and a real cell of each kind on tiny models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from optpass.bench import memory_models, memory_models_cell, memory_models_judge, memory_models_program
from optpass.bench.memory_models_judge import PARTS, failures_of_cell
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result

MB = 1_000_000
FLOOR, TOP = 10 * MB, 20 * MB


def _point(number: int, **changed: Any) -> dict[str, Any]:
    budget = FLOOR + (TOP - FLOOR) * number // 10
    peak = budget - 1000
    figures = {"first": peak, "first_predicted": peak, "peak": peak, "predicted": peak, "slowdown": 1.3 - number / 100}
    return {"budget": budget, **figures, "gap": False, "error": 0.0, "rng": True, "plans": 1} | changed


def _found(*changed: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A good cell; `changed`: of its budgets, from the fifth on."""
    points = [_point(number) for number in range(10)]
    for number, change in enumerate(changed, start=5):
        points[number] = points[number] | change
    return {"micro": 1, "points": points, "top": TOP, "named": FLOOR, "floor": FLOOR, "refused": FLOOR} | more


def _run(monkeypatch: pytest.MonkeyPatch, machine: Any, **config: Any) -> Result:
    monkeypatch.setattr(memory_models, "run_isolated", machine)
    return memory_models.run(BenchConfig(**config), NoProgress())


def test_the_claim_holds_on_good_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def machine(target: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        calls.append(dict(arguments))
        return _found()

    result = _run(monkeypatch, machine)
    assert result.passed is True, result.finding
    assert len(calls) == len({(c["model"], c["inner"], c["outside"], c["micro"]) for c in calls}) == 8 * 2 * 2 * 2
    assert [c["inner"] for c in calls] == ["aot_eager"] * 32 + ["inductor"] * 32
    assert {c["optimizer"] for c in calls if c["micro"] > 1} == {"adamw"}
    summaries = [row for row in result.rows if row.group == "all"]
    assert len(summaries) == 64 and all("falls short" not in row.extra for row in result.rows)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"peak": 15 * MB + 1, "predicted": 15 * MB + 1}, "held"),
        ({"first": 15 * MB + 1, "first_predicted": 15 * MB + 1}, "held"),
        ({"predicted": int(14.9 * MB)}, "predicted"),
        ({"first_predicted": int(14.9 * MB)}, "predicted"),
        ({"peak": int(14.2 * MB), "predicted": int(14.2 * MB)}, "used"),
        ({"error": 1e-12}, "gradients"),
        ({"error": float("inf")}, "gradients"),
        ({"rng": False}, "random state"),
        ({"slowdown": 1.5}, "monotone"),
    ],
)
def test_each_part_can_fail(changed: dict[str, Any], part: str) -> None:
    found = _found(changed)
    assert failures_of_cell(found, "aot_eager", 10) == [part]
    row = list(memory_models_judge.rows_of("cell", found, "aot_eager", 10))[-1]
    assert row.extra["falls short"] == part
    assert memory_models_judge.judge({"cell": (found, "aot_eager")}, 10, complete=True)[0] is False


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"named": int(0.9 * FLOOR)}, "floor"),
        ({"named": int(1.01 * FLOOR), "floor": int(1.01 * FLOOR), "refused": int(1.01 * FLOOR)}, "floor"),
        ({"refused": None}, "refused"),
        ({"refused": int(0.99 * FLOOR)}, "refused"),
    ],
)
def test_the_floor_is_judged(more: dict[str, Any], part: str) -> None:
    assert failures_of_cell(_found(**more), "inductor", 10) == [part]


def test_gradients_that_stay_are_known_from_the_second_micro_batch_on() -> None:
    assert failures_of_cell(_found(named=int(0.9 * FLOOR), micro=3), "inductor", 10) == []


def test_inductor_may_round() -> None:
    assert failures_of_cell(_found({"error": 1e-6}), "inductor", 10) == []
    assert failures_of_cell(_found({"error": 1e-4}), "inductor", 10) == ["gradients"]


@pytest.mark.parametrize("lost", [{"infeasible": 16 * MB}, {"failed": "RuntimeError: no"}])
def test_a_budget_that_does_not_run_fails(lost: dict[str, Any]) -> None:
    found = _found()
    found["points"][5] = {"budget": 15 * MB} | lost
    assert failures_of_cell(found, "inductor", 10) == ["every budget runs"]
    rows = list(memory_models_judge.rows_of("cell", found, "inductor", 10))
    assert rows[5].median == 0.0 and "failed" in rows[5].extra


def test_parts_are_named_once() -> None:
    assert len(set(PARTS)) == len(PARTS)


def test_cells_that_were_not_reached_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _run(monkeypatch, lambda *_, **__: _found(), models=("mlp",))
    assert result.passed is None and not [note for note in result.notes if "not measured" in note]
    late = _run(monkeypatch, lambda *_, **__: _found(), budget_s=-1.0)
    assert late.passed is None and len([note for note in late.notes if "not measured" in note]) == 64

    def broken(target: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        if arguments["model"] == "unet":
            raise BenchError("killed")
        return _found()

    some = _run(monkeypatch, broken)
    assert some.passed is None and any("not measured: unet" in note and "killed" in note for note in some.notes)


@pytest.mark.slow
def test_a_real_cell() -> None:
    torch = pytest.importorskip("torch")
    overrides = memory_models.overrides("mlp", BenchConfig(size="tiny")) | {"batch": 256, "layers": 4}
    found = memory_models_cell.measure("mlp", "tiny", overrides, "aot_eager", False, 3, "adamw", 2, 0)
    torch.compiler.reset()
    assert found["points"][0]["budget"] == found["floor"] < found["top"] and found["refused"] == found["floor"]
    assert len(found["points"]) == 2 and all("peak" in point for point in found["points"])
    wrong = failures_of_cell(found, "aot_eager", 2)
    assert not set(wrong) - {"used"}, found  # of tensors this few, plans lie apart


def test_different_gradients_are_seen() -> None:
    numpy = pytest.importorskip("numpy")
    seen = memory_models_program.Seen
    one = seen([1.0], {"a": numpy.ones(3), "b": numpy.full(3, 1e-9)})
    assert memory_models_program.difference(one, seen([1.0], dict(one.gradients))) == 0.0
    assert memory_models_program.difference(one, seen([1.0], one.gradients | {"a": numpy.full(3, 1.1)})) > 0.09
    assert 0 < memory_models_program.difference(one, seen([1.0], one.gradients | {"b": numpy.zeros(3)})) < 1e-5
    assert memory_models_program.difference(one, seen([1.0], one.gradients | {"a": numpy.full(3, numpy.nan)})) > 1
    assert memory_models_program.difference(one, seen([1.0], {"a": one.gradients["a"]})) > 1
    assert memory_models_program.difference(one, seen([2.0], dict(one.gradients))) == 1.0
