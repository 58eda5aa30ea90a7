"""How the probes of a calibration take time: the median of many short runs, on a machine that may be busy."""

from __future__ import annotations

import statistics
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


def typical(call: Callable[[], object], budget: Budget) -> float:
    """Seconds per call, the median over the runs: what is predicted from it are median step times.

    The least would be what the processor can do in its best moments, and predictions from it come out too short. A run
    that another process disturbs is one of many here, and `calibration_library` keeps the better of two rounds.
    """
    call()
    once = max(_timed(call, 1), 1e-8)
    if once > budget.total_s:
        return once
    repeat = max(1, min(10_000, int(budget.run_s / once)))
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < budget.least or (len(taken) < budget.runs and time.perf_counter() - begun < budget.total_s):
        taken.append(_timed(call, repeat))
    return statistics.median(taken)


def _timed(call: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat
