"""Statistics of paired timing samples: medians, ratios, bootstrap intervals and the verdict drawn from them.

Pure functions of numbers (numpy only). Nothing here measures, prints or knows what the numbers stand for.

Samples come in *rounds*: round i of every case was taken next to round i of the others, so that what the machine did
to one it did to all. The bootstrap therefore draws rounds, not samples (Efron & Tibshirani, An Introduction to the
Bootstrap, 1993, chapters 8 and 13: the paired percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Verdict = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]
Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 4000
#: The widest interval that n samples can give for a median, from smallest to largest, covers it with probability
#: 1 - 2**(1 - n): 87.5% for 4 samples, 93.8% for 5. With fewer than 5 no interval deserves to be called 95%.
MIN_ROUNDS = 5
#: Degrees of freedom (rounds beyond the first, summed over cells) below which a geometric mean gets no interval.
MIN_FREEDOM = 8


class Interval(NamedTuple):
    """A two-sided interval at `CONFIDENCE`, in the unit of the statistic."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between the bounds."""
        return (self.high - self.low) / 2


def median(samples: Sequence[float]) -> float:
    """The median, in the unit of the samples. Raises ValueError where there is none."""
    return float(np.median(_samples(samples)))


def median_interval(samples: Sequence[float], *, seed: int = 0) -> Interval | None:
    """The bootstrap interval of the median; None with fewer than `MIN_ROUNDS` samples."""
    values = _samples(samples)
    if len(values) < MIN_ROUNDS:
        return None
    drawn = _draws(len(values), len(values), np.random.default_rng(seed))
    return _percentiles(np.median(values[drawn], axis=1))


def ratio_of_medians(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """median(candidate) / median(baseline): below 1 the candidate takes less."""
    return median(candidate) / median(baseline)


def ratio_interval(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Interval | None:
    """The bootstrap interval of `ratio_of_medians` over paired rounds; None with fewer than `MIN_ROUNDS` rounds.

    Raises:
        ValueError: the two have different numbers of rounds, or a sample is not a positive finite number.
    """
    base, cand = _pair(baseline, candidate)
    if len(base) < MIN_ROUNDS:
        return None
    drawn = _draws(len(base), len(base), np.random.default_rng(seed))
    return _percentiles(np.median(cand[drawn], axis=1) / np.median(base[drawn], axis=1))


def together(one: Sequence[float], other: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The samples of the rounds that both cases took part in, where one was left out of later ones."""
    rounds = min(len(one), len(other))
    return one[:rounds], other[:rounds]


def verdict(interval: Interval | None, tolerance: float) -> Verdict:
    """What an interval of the ratio candidate / baseline proves, at tolerance t.

    FASTER: high < 1 - t. SLOWER: low > 1 + t. SAME: 1 - t <= low and high <= 1 + t. UNCLEAR: everything else, that
    is, an interval that reaches across 1 - t or 1 + t, or none at all.
    """
    if interval is None:
        return "UNCLEAR"
    if interval.high < 1 - tolerance:
        return "FASTER"
    if interval.low > 1 + tolerance:
        return "SLOWER"
    if 1 - tolerance <= interval.low and interval.high <= 1 + tolerance:
        return "SAME"
    return "UNCLEAR"


def geometric_mean(
    cells: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0
) -> tuple[float, Interval | None]:
    """The geometric mean over cells of each cell's ratio of medians, and its interval.

    A cell is (baseline samples, candidate samples) of one program; all cells weigh the same. The set of programs is
    taken as fixed: the interval speaks of the noise of measuring these programs, not of programs never measured.
    Rounds are drawn within each cell, one fewer than there are, so that the variance is not underestimated when
    cells have few rounds (Rao & Wu, Resampling inference with complex survey data, JASA 83, 1988). A cell of one
    round adds to the mean but not to the interval; with fewer than `MIN_FREEDOM` degrees of freedom, or where a cell
    has only one round, there is no interval (None), since it would claim more than was measured.

    Raises:
        ValueError: no cells, unequal rounds within one, or a sample that is not a positive finite number.
    """
    if not cells:
        raise ValueError("no cells to average")
    pairs = [_pair(baseline, candidate) for baseline, candidate in cells]
    logs = [math.log(float(np.median(cand)) / float(np.median(base))) for base, cand in pairs]
    value = math.exp(sum(logs) / len(logs))
    if min(len(base) for base, _ in pairs) < 2 or sum(len(base) - 1 for base, _ in pairs) < MIN_FREEDOM:
        return value, None
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for base, cand in pairs:
        drawn = _draws(len(base), len(base) - 1, rng)
        total += np.log(np.median(cand[drawn], axis=1) / np.median(base[drawn], axis=1))
    return value, _percentiles(np.exp(total / len(pairs)))


def _draws(rounds: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices of rounds, drawn with replacement: [RESAMPLES, size]."""
    return rng.integers(0, rounds, size=(RESAMPLES, size))


def _percentiles(statistic: Array) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _pair(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[Array, Array]:
    base, cand = _samples(baseline), _samples(candidate)
    if len(base) != len(cand):
        raise ValueError(f"rounds are not paired: {len(base)} of the baseline, {len(cand)} of the candidate")
    return base, cand


def _samples(samples: Sequence[float] | Any) -> Array:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or (values <= 0).any():
        raise ValueError(f"samples must be positive finite numbers, at least one: {samples!r}")
    return values
