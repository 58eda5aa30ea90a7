"""The statistics on samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optpass.bench import stats
from optpass.bench.stats import Interval


def _rounds(rng: np.random.Generator, n: int, ratio: float) -> tuple[list[float], list[float]]:
    """Paired rounds with noise of their own (2%) and a drift that both share (3%)."""
    drift = np.exp(rng.normal(0, 0.03, n))
    base = drift * np.exp(rng.normal(0, 0.02, n))
    cand = ratio * drift * np.exp(rng.normal(0, 0.02, n))
    return list(base), list(cand)


def test_the_ratio_of_exact_samples_is_exact() -> None:
    base = [1.0, 2.0, 3.0, 4.0, 5.0]
    cand = [3 * value for value in base]
    assert stats.ratio_of_medians(base, cand) == 3.0
    assert stats.ratio_interval([2.0] * 6, [3.0] * 6) == Interval(1.5, 1.5)
    assert stats.median([5.0, 1.0, 2.0, 4.0]) == 3.0


def test_pairing_matters_to_the_interval() -> None:
    """The same samples, with the rounds of one of them shuffled, are less certain: drift no longer cancels."""
    rng = np.random.default_rng(3)
    base = np.exp(rng.normal(0, 0.2, 25))
    paired = stats.ratio_interval(list(base), list(base * 0.9))
    apart = stats.ratio_interval(list(base), list(rng.permutation(base) * 0.9))
    assert paired is not None and apart is not None
    assert paired.half_width < apart.half_width / 4
    assert paired == pytest.approx((0.9, 0.9))


@pytest.mark.parametrize("rounds", [5, 10, 25])
def test_the_interval_of_a_ratio_covers_it_about_as_often_as_it_says(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 800)
    rng = np.random.default_rng(11)
    trials, hits = 400, 0
    for trial in range(trials):
        base, cand = _rounds(rng, rounds, 1.1)
        interval = stats.ratio_interval(base, cand, seed=trial)
        assert interval is not None
        hits += interval.low <= 1.1 <= interval.high
    # 95% nominal. A shared drift makes the interval conservative; the median's discreteness costs a little at 5.
    assert 0.91 <= hits / trials <= 0.998


def test_the_interval_of_a_median_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 800)
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(400):
        interval = stats.median_interval(list(np.exp(rng.normal(0, 0.1, 15))), seed=trial)
        assert interval is not None
        hits += interval.low <= 1.0 <= interval.high
    assert 0.91 <= hits / 400 <= 0.985


@pytest.mark.parametrize(("cells", "rounds"), [(16, 2), (16, 3), (4, 5)])
def test_the_interval_of_a_geometric_mean_covers_it(cells: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 500)
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(250):
        ratios = np.exp(rng.normal(0, 0.1, cells))
        truth = math.exp(float(np.log(ratios).mean()))
        value, interval = stats.geometric_mean([_rounds(rng, rounds, ratio) for ratio in ratios], seed=trial)
        assert interval is not None and value == pytest.approx(truth, rel=0.1)
        hits += interval.low <= truth <= interval.high
    assert 0.89 <= hits / 250 <= 0.998


def test_the_geometric_mean_weighs_cells_alike() -> None:
    value, _ = stats.geometric_mean([([1.0] * 3, [2.0] * 3), ([100.0] * 3, [50.0] * 3)])
    assert value == pytest.approx(1.0)


def test_too_few_rounds_give_no_interval() -> None:
    assert stats.ratio_interval([1.0] * 4, [1.0] * 4) is None
    assert stats.median_interval([1.0] * 4) is None
    assert stats.geometric_mean([([1.0, 1.0], [1.0, 1.0])] * 7)[1] is None
    assert stats.geometric_mean([([1.0, 1.0], [1.0, 1.0])] * 8)[1] == Interval(1.0, 1.0)
    assert stats.geometric_mean([([1.0] * 20, [1.0] * 20), ([1.0], [1.0])])[1] is None


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(0.90, 0.96), "FASTER"),
        (Interval(0.90, 0.97), "UNCLEAR"),  # touches 1 - t
        (Interval(0.97, 1.03), "SAME"),
        (Interval(0.9699, 1.0), "UNCLEAR"),
        (Interval(1.0, 1.0301), "UNCLEAR"),
        (Interval(1.03, 1.10), "UNCLEAR"),
        (Interval(1.0301, 1.10), "SLOWER"),
        (Interval(0.90, 1.10), "UNCLEAR"),
        (None, "UNCLEAR"),
    ],
)
def test_verdict_boundaries(interval: Interval | None, expected: str) -> None:
    assert stats.verdict(interval, 0.03) == expected


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_samples_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="positive finite"):
        stats.median(bad)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="not paired"):
        stats.ratio_interval([1.0] * 6, [1.0] * 5)
