"""The roofline claim: how predictions are held against measurements (figures we choose), and one real prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from optpass.bench import roofline
from optpass.bench.harness import Case, Comparison
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig, load
from optpass.bench.result import Result, from_json
from optpass.errors import ConfigError
from optpass.passes import devices

STEP_S = 0.002
NOISE = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the benchmark on models that take `STEP_S` and are predicted to take `ratio` times that."""

    def measured(cases: Sequence[Case], **_: Any) -> Comparison:
        samples = tuple(STEP_S * noise for noise in NOISE)
        return Comparison({case.name: samples for case in cases}, tolerance=0.03, seed=0, stopped="rounds")

    def run(ratio: float, busy: bool = False, **config: Any) -> Result:
        monkeypatch.setattr(roofline, "_spec", lambda *_: devices.resolve("cpu"))
        monkeypatch.setattr(roofline, "predicted_seconds", lambda *_: ratio * STEP_S)
        monkeypatch.setattr(roofline, "compare", measured)
        monkeypatch.setattr(roofline, "_busy", lambda device: busy)
        return roofline.run(BenchConfig(**config), NoProgress())

    return run


@pytest.mark.parametrize(("ratio", "passed"), [(1.1, True), (0.9, True), (1.25, None), (2.0, False), (0.1, False)])
def test_the_mean_absolute_error_decides(machine: Callable[..., Result], ratio: float, passed: bool | None) -> None:
    result = machine(ratio)
    assert result.passed is passed
    (summary,) = [row for row in result.rows if row.group == roofline.SUMMARY]
    assert summary.median == pytest.approx(abs(ratio - 1) * 100, abs=1e-6)
    assert from_json(result.to_json()).rows == result.rows


def test_every_model_is_held_in_both_modes(machine: Callable[..., Result]) -> None:
    from optpass import models

    rows = machine(1.1).rows
    groups = [row.group for row in rows if row.group != roofline.SUMMARY]
    assert groups == [f"{name} {mode}" for name in models.names() for mode in roofline.MODES]
    assert all(len(row.samples) == 6 and row.extra["predicted ms"] == pytest.approx(2.2) for row in rows if row.samples)


def test_a_part_of_the_models_proves_nothing(machine: Callable[..., Result]) -> None:
    assert machine(1.1, models=("mlp",)).passed is None
    assert machine(1.1, quick=True).passed is None


def test_time_running_out_is_said_and_leaves_it_undecided(machine: Callable[..., Result]) -> None:
    result = machine(1.1, budget_s=0.0)
    assert result.passed is None
    assert len([row for row in result.rows if row.samples]) == 1
    assert "time ran out" in result.notes[-1]


def test_a_busy_machine_proves_nothing(machine: Callable[..., Result]) -> None:
    result = machine(1.1, busy=True)
    assert result.passed is None
    assert "busy" in result.notes[-1]


def test_errors_do_not_cancel_and_the_interval_holds_the_value() -> None:
    samples = tuple(1.0 + 0.01 * (i % 5) for i in range(20))
    cells = [roofline.Cell("a", "inference", 1.224, samples), roofline.Cell("a", "training", 0.816, samples)]
    value, interval = roofline.mean_error(cells, seed=0)
    assert value == pytest.approx(0.2, abs=0.001)
    assert interval is not None
    assert interval.low <= value <= interval.high
    assert interval.high - interval.low < 0.05
    assert roofline.mean_error([roofline.Cell("a", "inference", 1.0, samples[:3])], 0)[1] is None


def test_unknown_models_sizes_and_devices_are_named() -> None:
    for config in (BenchConfig(size="smal"), BenchConfig(models=("gtp",)), BenchConfig(device="tpu")):
        with pytest.raises(ConfigError):
            roofline.run(config, NoProgress())


def test_it_is_registered() -> None:
    assert load("roofline").claim == roofline.CLAIM


def test_a_prediction_needs_nothing_but_the_graph() -> None:
    spec = devices.resolve("h200")
    inference = roofline.predicted_seconds("mlp", "tiny", "inference", "cpu", spec)
    training = roofline.predicted_seconds("mlp", "tiny", "training", "cpu", spec)
    assert 0 < inference < training < 1
    # Each of the three layers is at least one launch.
    assert inference > 3 * spec.launch_s
