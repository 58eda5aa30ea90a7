"""What the attention pass costs: how samples are laid out and judged (on figures we choose), and real ones, tiny."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from optpass.bench import attention_compile as bench
from optpass.bench import attention_compile_samples as samples
from optpass.bench.isolate import run_isolated
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, from_json
from optpass.errors import ConfigError

NOISE = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0)
NODES = {"gpt": 200, "llama": 300, "bert": 210, "vit": 220, "t5": 500, "unet": 400, "mlp": 900, "dlrm": 50}


class Machine:
    """Stands for the fresh processes: a pass that takes `share` of each compile, and nodes ** `power` seconds."""

    def __init__(self, share: float, power: float) -> None:
        self.share, self.power = share, power
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, target: str, arguments: Mapping[str, Any], *, environ: Mapping[str, str]) -> dict[str, Any]:
        function = target.rpartition(":")[2]
        self.calls.append((function, dict(arguments)))
        if function == "survey":
            return {m: {"nodes": NODES[m], "sites": 0 if m in ("mlp", "dlrm") else 4} for m in arguments["models"]}
        if function == "share":
            number = sum(one == (function, dict(arguments)) for one in self.calls) - 1
            return self._sample(500, 20.0 * self.share * NOISE[number % len(NOISE)])
        rounds = range(arguments["rounds"])
        return {
            str(depth): [self._sample(46 * depth, 1e-4 * (46 * depth) ** self.power * NOISE[n % 6]) for n in rounds]
            for depth in arguments["layers"]
        }

    @staticmethod
    def _sample(nodes: float, seconds: float) -> dict[str, float]:
        return {"nodes": float(nodes), "compile_s": 20.0, "pass_s": seconds, "fused": 4.0, "declined": 0.0}


def _run(
    monkeypatch: pytest.MonkeyPatch, share: float = 0.01, power: float = 1.0, **config: Any
) -> tuple[Result, Machine]:
    machine = Machine(share, power)
    monkeypatch.setattr(bench, "run_isolated", machine)
    return bench.run(BenchConfig(**config), NoProgress()), machine


def _shares(machine: Machine) -> list[tuple[str, str]]:
    return [(arguments["model"], arguments["mode"]) for function, arguments in machine.calls if function == "share"]


# From 24 layers to 96, time per node grows by 4 ** (power - 1): 1.47 with 1.28, 1.54 with 1.31.
@pytest.mark.parametrize(
    ("share", "power", "passed"),
    [
        (0.01, 1.0, True),
        (0.045, 1.0, True),
        (0.05, 1.0, None),
        (0.06, 1.0, False),
        (0.01, 1.28, True),
        (0.01, 1.31, False),
        (0.01, 2.0, False),
        (0.06, 2.0, False),
    ],
)
def test_share_and_growth_both_decide(
    monkeypatch: pytest.MonkeyPatch, share: float, power: float, passed: bool | None
) -> None:
    result, _ = _run(monkeypatch, share, power)
    assert result.passed is passed
    assert from_json(result.to_json()).rows == result.rows
    deepest = [row for row in result.rows if row.case == "96 layers"]
    assert [row.group for row in deepest] == ["gpt inference", "bert training"]
    assert all(row.ratio == pytest.approx(4 ** (power - 1)) for row in deepest)


def test_the_largest_model_with_attention_comes_first_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, rounds=1)
    by_size = ["t5", "unet", "llama", "vit", "bert", "gpt"]
    others = [(name, mode) for mode in bench.MODES for name in by_size[1:]]
    assert _shares(machine) == [("t5", "inference"), ("t5", "training"), *others]
    assert "t5 training 1.00%" in result.finding and "unet" not in result.finding
    assert result.rows[0].group == "t5, 500 nodes" and result.rows[0].extra["pass ms"] == pytest.approx(200.0)
    assert any(note == "without attention: mlp, dlrm" for note in result.notes)


def test_few_compiles_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of shares, since no time is left for more; growth has all of its rounds."""
    for share in (0.001, 0.5):
        result, _ = _run(monkeypatch, share, budget_s=0.0)
        assert result.passed is None and f"{share:.2%} of compile time (too few rounds" in result.finding


def test_the_largest_model_has_its_rounds_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, machine = _run(monkeypatch)
    assert _shares(machine)[: 2 * bench.ROUNDS] == [("t5", "inference"), ("t5", "training")] * bench.ROUNDS
    assert set(_shares(machine)[2 * bench.ROUNDS :]) == {
        (name, mode) for name in ("unet", "llama", "vit", "bert", "gpt") for mode in bench.MODES
    }


def test_rounds_too_few_for_an_interval_of_growth_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = _run(monkeypatch, rounds=2)
    assert result.passed is None and "too few rounds" in result.finding


def test_time_running_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, budget_s=0.0)
    assert _shares(machine) == [("t5", "inference"), ("t5", "training")] and result.passed is None
    assert result.notes[-1].startswith("not measured, time ran out: unet inference, llama inference")


def test_a_quick_look_claims_nothing_but_can_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, quick=True)
    assert result.passed is None and _shares(machine) == [("gpt", "inference")]
    assert _run(monkeypatch, share=0.5, quick=True, rounds=6)[0].passed is None  # one compile is no interval
    assert _run(monkeypatch, power=3.0, quick=True, rounds=6)[0].passed is False
    assert _run(monkeypatch, models=("t5",))[0].passed is None


def test_models_without_attention_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = _run(monkeypatch, models=("mlp",))
    assert result.passed is None and not _shares(machine)


def test_what_it_cannot_measure_is_refused() -> None:
    for config in (BenchConfig(size="tinny"), BenchConfig(models=("gptt",)), BenchConfig(device="tpu")):
        with pytest.raises(ConfigError):
            bench.run(config, NoProgress())


def test_growth_is_measured_on_graphs_that_are_rewritten() -> None:
    """Real samples: every layer's attention fused in every round, and the graph of the second round is a fresh one."""
    found = samples.grow("gpt", "training", layers=(1, 3), rounds=2, device="cpu", seed=0)
    assert [(one["fused"], one["declined"]) for one in found["1"] + found["3"]] == [(1, 0)] * 2 + [(3, 0)] * 2
    assert found["3"][0]["nodes"] > 2 * found["1"][0]["nodes"] and found["3"][0]["nodes"] == found["3"][1]["nodes"]
    assert all(0 < one["pass_s"] < one["compile_s"] for one in found["1"] + found["3"])


@pytest.mark.slow
def test_a_real_share_is_taken_in_a_fresh_process() -> None:
    arguments = {"model": "gpt", "size": "tiny", "mode": "inference", "device": "cpu", "seed": 0}
    sample = run_isolated("optpass.bench.attention_compile_samples:share", arguments, environ={"OMP_NUM_THREADS": "1"})
    assert sample["fused"] == 2 and 0 < sample["pass_s"] < sample["compile_s"] / 5
