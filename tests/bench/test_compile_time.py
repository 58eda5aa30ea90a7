"""The compile-time claim: how samples are laid out and judged (on figures we choose), and one real sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from optpass.bench import compile_time
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result
from optpass.errors import ConfigError


class Machine:
    """Stands for the isolated processes: figures with 2% noise, optpass `ratio` times Inductor."""

    def __init__(self, ratio: float) -> None:
        self.ratio, self.rng = ratio, np.random.default_rng(2)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, target: str, arguments: Mapping[str, Any], *, environ: Mapping[str, str]) -> dict[str, float]:
        assert environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
        self.calls.append(dict(arguments))
        factor = (self.ratio if arguments["backend"] == "optpass" else 1.0) * float(np.exp(self.rng.normal(0, 0.02)))
        return {"own_s": 2 * factor, "children_s": 3 * factor, "first_use_s": 1.0, "wall_s": 6 * factor}


def _run(monkeypatch: pytest.MonkeyPatch, ratio: float, **config: Any) -> tuple[Result, Machine]:
    machine = Machine(ratio)
    monkeypatch.setattr(compile_time, "run_isolated", machine)
    return compile_time.run(BenchConfig(**config), NoProgress()), machine


def _summary(result: Result, case: str) -> float:
    return next(r.ratio for r in result.rows if r.group == compile_time.SUMMARY and r.case == case) or 0.0


@pytest.mark.parametrize(("ratio", "passed"), [(1.0, True), (1.03, True), (1.05, None), (1.1, False)])
def test_the_interval_decides(monkeypatch: pytest.MonkeyPatch, ratio: float, passed: bool | None) -> None:
    result, _ = _run(monkeypatch, ratio, rounds=3)
    assert result.passed is passed
    assert _summary(result, "optpass") == pytest.approx(ratio, rel=0.02)
    assert _summary(result, "inductor again (noise)") == pytest.approx(1.0, rel=0.02)
    assert _summary(result, "optpass, first use in a process") == 1.0


def test_every_model_is_measured_in_both_modes_and_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from optpass import models

    result, machine = _run(monkeypatch, 1.0, rounds=2)
    cells = {(call["model"], call["mode"]) for call in machine.calls}
    assert cells == {(name, mode) for name in models.names() for mode in ("inference", "training")}
    assert len(machine.calls) == len(cells) * 3 * 2
    assert [row.case for row in result.rows[:3]] == ["inductor", "optpass", "inductor again"]
    assert all(len(row.samples) == 2 for row in result.rows if row.group != compile_time.SUMMARY)
    assert result.rows[0].median == pytest.approx(5.0, rel=0.1)  # the process and its children together


def test_rounds_are_interleaved_and_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, machine = _run(monkeypatch, 1.0, rounds=2, models=("mlp",), size="tiny")
    backends = [call["backend"] for call in machine.calls]
    inference, training, again, _ = (backends[i : i + 3] for i in range(0, 12, 3))
    assert again == inference[::-1] and training == inference


def test_without_time_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, 1.0, budget_s=0.0)
    assert len(machine.calls) == 3 and result.passed is None
    assert "not measured, time ran out: gpt training" in result.notes[-1]


def test_it_stops_once_the_interval_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, 1.0, rounds=50)
    assert len(machine.calls) < 50 * 16 * 3 // 4 and result.passed is True


def test_a_quick_look_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, 1.0, quick=True)
    assert result.passed is None and "too few rounds" in result.finding
    assert {call["size"] for call in machine.calls} == {"tiny"} and len(machine.calls) == 6


def test_a_size_that_a_model_lacks_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no size 'tinny'; did you mean 'tiny'"):
        _run(monkeypatch, 1.0, size="tinny")


@pytest.mark.slow
def test_a_real_sample_is_taken_in_a_fresh_process() -> None:
    arguments = {"model": "mlp", "size": "tiny", "mode": "inference", "backend": "optpass", "device": "cpu", "seed": 0}
    sample = run_isolated("optpass.bench.compile_time:sample", arguments, environ={"OMP_NUM_THREADS": "1"})
    assert set(sample) == {"own_s", "children_s", "first_use_s", "wall_s"}
    assert 0 < sample["own_s"] < 60 and sample["first_use_s"] > sample["own_s"] / 10
