"""The harness: order, stopping, clocks and what a comparison says."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from optpass.bench import harness
from optpass.bench.clocks import ClockKind, cpu_seconds
from optpass.bench.harness import Case, compare, schedule
from optpass.errors import ConfigError


def _work(amount: int) -> Callable[[], object]:
    return lambda: sum(range(amount))


def _fake_clock(monkeypatch: pytest.MonkeyPatch, figures: dict[str, list[float]]) -> list[str]:
    """Replace the clock: a case's call returns its name, and its samples are `figures`, repeated. Returns the log."""
    log: list[str] = []

    def tick(call: Callable[[], object], iterations: int) -> float:
        name = str(call())
        log.append(name)
        return figures[name][(log.count(name) - 1) % len(figures[name])]

    monkeypatch.setattr(harness, "clock", lambda device, kind: tick)
    return log


def _named(*names: str) -> list[Case]:
    return [Case(name, lambda name=name: lambda: name) for name in names]  # type: ignore[misc]


def test_each_pair_of_rounds_is_a_palindrome() -> None:
    orders = [order for _, order in schedule(["a", "b", "c"], 40, seed=1)]
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    firsts = Counter(order[0] for order in orders[::2])
    assert set(firsts) == {"a", "b", "c"}  # random, not always the baseline


def test_the_order_follows_the_seed() -> None:
    orders = [[order for _, order in schedule(list("abcd"), 20, seed=s)] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_cases_are_interleaved_as_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _fake_clock(monkeypatch, {"a": [1.0, 2.0], "b": [1.5, 0.7]})
    compare(_named("a", "b"), rounds=6, warmup=1, seed=4)
    wanted = [name for _, order in schedule(["a", "b"], 6, seed=4) for name in order]
    assert log == ["a", "a", "b", "b", *wanted]  # warm-up and calibration first


def test_it_stops_when_intervals_are_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_clock(monkeypatch, {"a": [1.0], "b": [0.8]})
    found = compare(_named("a", "b"), rounds=40)
    assert found.stopped == "narrow" and len(found.samples["a"]) == 6
    assert found.verdict("b") == "FASTER" and found.ratio("b") == pytest.approx(0.8)


def test_it_stops_at_the_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_clock(monkeypatch, {"a": [1.0, 1.4, 0.7], "b": [1.3, 0.8, 1.0, 1.1]})
    found = compare(_named("a", "b"), rounds=8)
    assert found.stopped == "rounds" and len(found.samples["b"]) == 8
    assert found.verdict("b") == "UNCLEAR"


def test_it_stops_when_time_is_over_with_pairs_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_clock(monkeypatch, {"a": [1.0], "b": [1.0]})
    found = compare(_named("a", "b"), rounds=40, budget_s=0.0)
    assert found.stopped == "budget" and {len(s) for s in found.samples.values()} == {2}
    assert found.interval("b") is None and found.verdict("b") == "UNCLEAR"


def test_what_is_far_behind_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"slow": [9.0], "kept": [8.0], "a": [1.0, 1.4, 0.7], "b": [1.3, 0.8, 1.0, 1.1], "once": [3.0, 1.0]}
    _fake_clock(monkeypatch, times)
    found = compare(_named(*times), rounds=8, far=2.0, always=["kept"])
    assert {name: len(taken) for name, taken in found.samples.items()} == {
        "slow": 2, "kept": 8, "a": 8, "b": 8, "once": 8,
    }  # fmt: skip
    assert found.interval("a") is None and found.ratio("kept") == pytest.approx(8 / 9)
    assert [row.case for row in found.rows()] == list(times)


@pytest.mark.parametrize("kind", ["wall", "cpu"])
def test_real_time_tells_slow_from_fast(kind: ClockKind) -> None:
    # Far apart, because a busy machine stretches wall time several times over.
    cases = [Case("1", lambda: _work(10_000)), Case("40", lambda: _work(400_000))]
    found = compare(cases, rounds=8, budget_s=20.0, tolerance=0.1, kind=kind)
    assert found.verdict("40") == "SLOWER" and found.ratio("40") > 10
    if kind == "cpu":
        assert found.ratio("40") == pytest.approx(40.0, rel=0.3)


def test_processor_time_does_not_count_sleep() -> None:
    found = compare([Case("sleep", lambda: lambda: time.sleep(0.02))], rounds=2, kind="cpu")
    assert max(found.samples["sleep"]) < 0.01


def test_processor_time_counts_children() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "x = 0\nfor i in range(3_000_000): x += i"], check=True)
    after = cpu_seconds()
    assert after[1] - before[1] >= 0.05
    assert after[0] - before[0] < after[1] - before[1]


def test_rows_hold_the_baseline_first() -> None:
    found = harness.Comparison({"a": (1.0,) * 6, "b": (2.0,) * 6}, 0.03, 0, "rounds")
    first, second = found.rows("x")
    assert (first.case, first.ratio, first.verdict) == ("a", None, None)
    assert (second.ratio, second.ratio_ci, second.verdict, second.group) == (2.0, (2.0, 2.0), "SLOWER", "x")


def test_cases_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        compare(_named("a", "a"))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu'; valid: cpu, cuda"):
        compare(_named("a"), device="tpu")


def test_cuda_events_measure_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, y = torch.randn(2048, 2048, device="cuda"), torch.randn(4096, 4096, device="cuda")
    found = compare([Case("2048", lambda: lambda: x @ x), Case("4096", lambda: lambda: y @ y)], device="cuda")
    assert found.verdict("4096") == "SLOWER" and found.ratio("4096") > 4
