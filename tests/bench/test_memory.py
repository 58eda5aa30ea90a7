"""The memory benchmark: verdicts on figures we choose, and the real ways on a tiny model under aot_eager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optpass.bench import memory, memory_compile, memory_cuda, memory_journal, memory_judge, memory_ways
from optpass.bench.gpu_lock import GpuLock, nobody_else
from optpass.bench.progress import NoProgress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result

STATICS = 1_000_000
NAMES = [memory_ways.pytorch(ratio) for ratio in memory.RATIOS]


def _way(peak: int, seconds: float, **more: Any) -> dict[str, Any]:
    samples = [seconds * (1 + 0.001 * i) for i in range(8)]
    return {"peak": peak, "left": 1_000_000, "samples": samples, **more}


def _ours(budget: int, seconds: float, used: float = 1.0, error: float = 0.0) -> dict[str, Any]:
    peak = int((STATICS + budget) * used) - STATICS
    return _way(peak, seconds, budget=budget, predicted=int(peak * (1 + error)))


def _ways(**changed: Any) -> dict[str, dict[str, Any]]:
    ways = {name: _way(20_000_000, 0.10) for name in NAMES}
    ways |= {memory_ways.beside(name): _ours(20_000_000, 0.09, used=0.97) for name in NAMES}
    ways[memory_ways.UNCONSTRAINED] = _way(40_000_000, 0.085, budget=1 << 50, predicted=40_000_000)
    ways[memory_ways.FLOOR] = _ours(8_000_000, 0.12)
    ways[memory_ways.FEWER] = _ours(12_700_000, 0.09)
    ways[memory_ways.EAGER] = _way(45_000_000, 0.1)
    ways[memory_ways.EAGER_CHECKPOINT] = _way(9_000_000, 0.13)
    return ways | changed


class Machine:
    """Stands for the fresh processes."""

    def __init__(self, ways: dict[str, dict[str, Any]], compile_ratio: float = 1.3) -> None:
        self.ways, self.compile_ratio = ways, compile_ratio
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, target: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        what = target.rpartition(":")[2]
        self.calls.append((what, dict(arguments)))
        if what == "measure":
            return {"statics": STATICS, "ways": self.ways}
        if what == "planning":
            return {"nodes": 170.0 * arguments["layers"], "seconds": 0.01 * arguments["layers"]}
        return {"seconds": 10.0 * (self.compile_ratio if arguments["budget"] else 1.0)}


def _run(monkeypatch: pytest.MonkeyPatch, machine: Machine, **config: Any) -> Result:
    monkeypatch.setattr(memory, "run_isolated", machine)
    return memory.run(BenchConfig(**config), NoProgress())


def _verdicts(ways: dict[str, dict[str, Any]]) -> dict[str, bool | None]:
    return {v.part: v.holds for v in memory_judge.judge("gpt", ways, NAMES, STATICS, 0)}


def test_the_claim_holds_on_good_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(_ways())
    result = _run(monkeypatch, machine)
    assert result.passed is True, result.finding
    assert [what for what, _ in machine.calls].count("planning") == len(memory.LAYERS)
    curves = [row for row in result.rows if row.group == "gpt: curves"]
    assert curves[0].case == memory_ways.UNCONSTRAINED and curves[0].ratio is None
    pair = [row for row in result.rows if row.group == "gpt: PyTorch 0.5"]
    assert [row.case for row in pair] == ["PyTorch 0.5", "optpass at the peak of PyTorch 0.5"]
    assert pair[1].ratio == pytest.approx(0.9) and pair[1].extra["peak MB"] == pytest.approx(19.37)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({memory_ways.FEWER: _ours(12_700_000, 0.09, used=1.001)}, "held and used"),
        ({memory_ways.FEWER: _ours(12_700_000, 0.09, used=0.94)}, "held and used"),
        ({memory_ways.FEWER: _ours(12_700_000, 0.09, error=0.01)}, "predicted"),
        ({memory_ways.beside("PyTorch 0.3"): _ours(20_000_000, 0.11)}, "no slower than PyTorch at its peaks"),
        ({memory_ways.FEWER: _ours(12_700_000, 0.099)}, "at most 10% slower at 70% fewer activation bytes"),
        ({memory_ways.FLOOR: _ours(9_100_000, 0.12)}, "floor at most eager checkpointing's peak"),
    ],
)
def test_each_part_can_fail(changed: dict[str, Any], part: str) -> None:
    verdicts = _verdicts(_ways(**changed))
    assert verdicts[part] is False
    assert all(holds for name, holds in verdicts.items() if name != part)


def test_too_few_rounds_decide_nothing() -> None:
    ways = _ways()
    for way in ways.values():
        way["samples"] = way["samples"][:2]
    assert _verdicts(ways)["no slower than PyTorch at its peaks"] is None


def test_a_peak_of_pytorchs_that_no_plan_reaches_fails() -> None:
    way = _ours(20_000_000, 0.09) | {"infeasible": True}
    assert _verdicts(_ways(**{memory_ways.beside("PyTorch 0.1"): way}))["no slower than PyTorch at its peaks"] is False


@pytest.mark.parametrize(("ratio", "holds"), [(1.5, True), (1.7, False)])
def test_compile_time_is_judged(ratio: float, holds: bool) -> None:
    samples = {memory_compile.INDUCTOR: [10.0] * 5, memory_compile.AT_FLOOR: [10.0 * ratio] * 5}
    assert memory_judge.judge_compile("gpt", samples, 0).holds is holds


def test_planning_is_judged_by_size() -> None:
    fast, slow = {"nodes": 2100.0, "seconds": 4.0}, {"nodes": 9800.0, "seconds": 31.0}
    assert memory_judge.judge_planning([fast, slow]).holds is False
    assert memory_judge.judge_planning([fast, slow | {"seconds": 29.0}]).holds is True
    assert memory_judge.judge_planning([fast]).holds is None


def test_a_look_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(_ways())
    assert _run(monkeypatch, machine, models=("mlp",), inner="aot_eager").passed is None
    _, arguments = machine.calls[0]
    assert arguments["inner"] == "aot_eager" and "targets" not in arguments["overrides"]


def test_cuda_is_judged_against_the_fastest_way_that_fits() -> None:
    ways = {
        "eager, checkpointed": _way(10, 1.0),
        "PyTorch 0.4": _way(18, 0.8),
        "PyTorch 0.8": _way(30, 0.5),
        "optpass, 20": _way(19, 0.79),
    }
    verdict = memory_cuda.judge("optpass, 20", ways, 20)
    assert verdict.holds is True and "PyTorch 0.4" in verdict.text
    ways["optpass, 20"] = _way(19, 0.81)
    assert memory_cuda.judge("optpass, 20", ways, 20).holds is False
    ways["optpass, 20"] = _way(21, 0.1)
    assert memory_cuda.judge("optpass, 20", ways, 20).holds is False
    ways["optpass, 20"] = _way(19, 0.8) | {"samples": [0.79, 0.82, 0.78, 0.81, 0.8, 0.83]}
    ways["PyTorch 0.4"] |= {"samples": [0.8, 0.79, 0.82, 0.78, 0.81, 0.8]}
    assert memory_cuda.judge("optpass, 20", ways, 20).holds is None
    ways["optpass, 9"] = _way(9, 1.2)
    alone = memory_cuda.judge("optpass, 9", ways, 9)
    assert alone.holds is True and "no way of PyTorch fits" in alone.text


def test_a_process_compiles_while_its_caller_has_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpass.backend.compat.dynamo.call_when_compiled", lambda _: None)
    path = str(tmp_path / "lock")
    lock = GpuLock(path)
    with nobody_else(path), lock.lent():
        lock.take()  # as after a compile; would wait for ever
    with nobody_else(path):  # it is the caller's to let go
        pass


def test_a_failed_way_fails_alone() -> None:
    ways = _ways(**{memory_ways.FEWER: {"failed": "RuntimeError: no"}, "PyTorch 0.5": {"failed": "RuntimeError: no"}})
    verdicts = _verdicts(ways)
    assert verdicts["every way runs"] is False and verdicts["held and used"] is True
    assert verdicts["no slower than PyTorch at its peaks"] is None
    assert memory_judge.rows_of("gpt", ways, NAMES, 0.03, 0)
    assert _verdicts(_ways(**{"PyTorch 0.5": {"failed": "RuntimeError: no"}}))["every way runs"] is None


def test_what_was_found_before_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = _ways()
    del ways[memory_ways.FEWER]

    class Dying(Machine):
        def __call__(self, target: str, arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
            answer = super().__call__(target, arguments, **more)
            if "journal" in arguments:
                memory_journal.write(arguments["journal"], "times", answer)
                raise BenchError("killed")
            return answer

    result = _run(monkeypatch, Dying(ways))
    assert result.passed is None and any("killed" in note for note in result.notes)
    assert any(row.case == memory_ways.FLOOR for row in result.rows)


def test_a_failure_before_anything_was_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(Machine):
        def __call__(self, target: str, arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
            raise BenchError("killed")

    with pytest.raises(BenchError, match="killed"):
        _run(monkeypatch, Dead(_ways()))


@pytest.mark.slow
def test_the_ways_of_a_tiny_model_are_what_they_are_called(hasty: None) -> None:
    torch = pytest.importorskip("torch")
    overrides = {"targets": True, "dropout": 0.0, "batch": 4, "seq": 32, "layers": 1}
    answer = memory_ways.measure("gpt", "tiny", overrides, "aot_eager", [0.5], [], 2, 0, 60.0)
    torch.compiler.reset()
    ways = answer["ways"]
    assert ways[memory_ways.EAGER_CHECKPOINT]["peak"] < ways[memory_ways.EAGER]["peak"]
    assert ways[memory_ways.pytorch(0.5)]["peak"] < ways[memory_ways.EAGER]["peak"]
    assert all(len(way["samples"]) == 2 and min(way["samples"]) > 0 for way in ways.values())
    ours = {name: way for name, way in ways.items() if "budget" in way}
    assert len(ours) == 4 and not any("failed" in way for way in ways.values())
    for name, way in ours.items():
        assert way["peak"] <= way["budget"], name
        assert way["predicted"] == pytest.approx(way["peak"], rel=0.01), name
    assert ours[memory_ways.FLOOR]["peak"] < ours[memory_ways.UNCONSTRAINED]["peak"]
