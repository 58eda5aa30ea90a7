"""The harness that every performance claim is measured with: warm-up, interleaved rounds, and when to stop.

Clocks are in `clocks`, intervals and verdicts in `stats`, fresh processes in `isolate`, files in `result`. No claim and
no model is known here.

How `compare` measures. Each case is made once, called `warmup` times, and timed in samples of as many calls as fill
`MIN_SAMPLE_S`. A round takes one sample of each case. Rounds come in pairs: the second runs the cases in the reverse
order of the first (A B, then B A), so that drift over a pair falls on all alike; the first order of each pair is drawn
from the seed. After each pair, from `stats.MIN_ROUNDS` rounds on, it stops when the 95% interval of every ratio is
narrower than the tolerance (half width at most tolerance / 2); it also stops after `rounds` rounds, or when
`budget_s` seconds have passed. The stop looks at widths only, never at the ratios, so that it favours no verdict.

Where one case takes as long as ten others, rounds are few. With `far`, a case that was so many times slower than the
fastest in both rounds of the first pair is out of the running, and left out of the rounds that follow.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from optpass.bench.clocks import Call, Clock, ClockKind, clock
from optpass.bench.progress import NoProgress, Progress
from optpass.bench.result import Row, sample_rows
from optpass.bench.stats import MIN_ROUNDS, Interval, Verdict, ratio_interval, ratio_of_medians, together, verdict

T = TypeVar("T")

ROUNDS = 40
BUDGET_S = 60.0
TOLERANCE = 0.03
WARMUP = 3
MIN_SAMPLE_S = 0.02
_MAX_ITERATIONS = 10_000

Stopped = Literal["narrow", "rounds", "budget"]


@dataclass(frozen=True)
class Case:
    """Something to time: `make()` sets it up (untimed) and returns the call that is timed."""

    name: str
    make: Callable[[], Call]


@dataclass(frozen=True)
class Comparison:
    """Samples of cases measured in the same rounds, in seconds per call; the first case is the baseline. A case that
    fell far behind has those of the first rounds alone."""

    samples: dict[str, tuple[float, ...]]
    tolerance: float
    seed: int
    stopped: Stopped
    """Why no more rounds were taken: intervals narrow enough, number of rounds reached, or time over."""

    @property
    def baseline(self) -> str:
        """Name of the case that the others are held against."""
        return next(iter(self.samples))

    def ratio(self, name: str) -> float:
        """Median of `name` over the baseline's; below 1 it is faster."""
        return ratio_of_medians(*together(self.samples[self.baseline], self.samples[name]))

    def interval(self, name: str) -> Interval | None:
        """95% bootstrap interval of `ratio(name)`; None below `stats.MIN_ROUNDS` rounds that both took part in."""
        return ratio_interval(*together(self.samples[self.baseline], self.samples[name]), seed=self.seed)

    def verdict(self, name: str) -> Verdict:
        """What the interval proves at this tolerance; see `stats.verdict`."""
        return verdict(self.interval(name), self.tolerance)

    def rows(self, group: str = "") -> list[Row]:
        """The cases as rows of a `Result`."""
        return sample_rows(self.samples, tolerance=self.tolerance, seed=self.seed, group=group)


def compare(
    cases: Sequence[Case],
    *,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    tolerance: float = TOLERANCE,
    device: str = "cpu",
    kind: ClockKind = "wall",
    warmup: int = WARMUP,
    seed: int = 0,
    progress: Progress | None = None,
    far: float = math.inf,
    always: Collection[str] = (),
) -> Comparison:
    """Time the cases against the first of them, in this process, as the module's docstring says.

    Args:
        rounds: at most this many; at least one pair is always taken.
        budget_s: wall seconds, set-up and warm-up included; looked at after each pair of rounds.
        tolerance: ratios within 1 +- tolerance count as the same.
        device: 'cpu', or 'cuda' (timed by CUDA events).
        kind: 'wall', or 'cpu' for processor time of this process and its children.
        far: cases so many times slower than the fastest are timed in the first pair of rounds alone.
        always: names of those that are not.

    Raises:
        ValueError: no cases, or two of one name.
        ConfigError: no such device here.
    """
    _check_names([case.name for case in cases])
    tick, told = clock(device, kind), progress or NoProgress()
    begun = time.monotonic()
    told.start(rounds)
    # Processor time says nothing of how long a call that waits will take, so samples are sized by wall time.
    size = clock(device, "wall")
    calls = {case.name: _prepared(case, size, warmup, told) for case in cases}
    samples: dict[str, list[float]] = {case.name: [] for case in cases}
    stopped: Stopped = "rounds"
    out: set[str] = set()
    for number, order in schedule(list(calls), max(2, rounds + rounds % 2), seed):
        told.step(f"round {number + 1}", count=1 if number else 0)
        gc.collect()  # the clocks keep the collector out of the samples
        for name in order:
            if name in out:
                continue
            call, iterations = calls[name]
            samples[name].append(tick(call, iterations))
        if number % 2 == 0:
            continue  # the pair is not complete
        if number == 1:
            out = {name for name in _far_behind(samples, far) if name not in always}
        if _narrow({name: taken for name, taken in samples.items() if name not in out}, tolerance, seed):
            stopped = "narrow"
            break
        if time.monotonic() - begun >= budget_s:
            stopped = "budget"
            break
    return Comparison({name: tuple(values) for name, values in samples.items()}, tolerance, seed, stopped)


def schedule(names: Sequence[T], rounds: int, seed: int) -> Iterator[tuple[int, list[T]]]:
    """`(round, order)`: a fresh random order for each even round, and its reverse for the odd one after it."""
    rng = random.Random(seed)
    order = list(names)
    for number in range(rounds):
        if number % 2 == 0:
            rng.shuffle(order)
            yield number, list(order)
        else:
            yield number, order[::-1]


def _check_names(names: list[str]) -> None:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"cases need distinct names, and at least one: {names}")


def _prepared(case: Case, size: Clock, warmup: int, told: Progress) -> tuple[Call, int]:
    """The case's call, warmed up, and how many calls make a sample of `MIN_SAMPLE_S` by the clock `size`."""
    told.step(f"{case.name}: warm-up")
    call = case.make()
    if warmup:
        size(call, warmup)
    once = max(size(call, 1), 1e-9)
    return call, min(_MAX_ITERATIONS, max(1, math.ceil(MIN_SAMPLE_S / once)))


def _far_behind(samples: Mapping[str, Sequence[float]], far: float) -> Iterator[str]:
    """Cases that took more than `far` times as long as the fastest in every round so far."""
    fastest = [min(taken) for taken in zip(*samples.values(), strict=True)]
    for name, taken in samples.items():
        if all(one > far * best for one, best in zip(taken, fastest, strict=True)):
            yield name


def _narrow(samples: dict[str, list[float]], tolerance: float, seed: int) -> bool:
    base, *others = samples.values()
    if len(base) < MIN_ROUNDS or not others:
        return False
    intervals = [ratio_interval(base, other, seed=seed) for other in others]
    return all(found is not None and found.half_width <= tolerance / 2 for found in intervals)
