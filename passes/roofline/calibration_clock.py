"""How the probes of a calibration take time: the least of many short runs, on a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How long one probe may take: runs of at least `run_s` each, until `total_s` has passed or `runs` were taken.

    Runs are many and short: a thread that waits for its core takes a scheduler's slice of milliseconds, and a run that
    is to miss them all must fit between two.
    """

    run_s: float = 2e-5
    total_s: float = 0.03
    runs: int = 300
    least: int = 5


def fastest(call: Callable[[], object], budget: Budget) -> float:
    """Seconds per call, the least over the runs: other processes only ever add time."""
    call()
    once = max(_timed(call, 1), 1e-8)
    if once > budget.total_s:
        return once
    repeat = max(1, min(10_000, int(budget.run_s / once)))
    best, taken, begun = once, 0, time.perf_counter()
    while taken < budget.least or (taken < budget.runs and time.perf_counter() - begun < budget.total_s):
        best = min(best, _timed(call, repeat))
        taken += 1
    return best


def _timed(call: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat
