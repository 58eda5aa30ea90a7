"""Clocks: seconds that some calls took, with the device waited for. Nothing here decides how often or in what order."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from optpass.errors import ConfigError

Call = Callable[[], object]
Clock = Callable[[Call, int], float]
"""`clock(call, iterations)` calls it that often and returns seconds per call."""

ClockKind = Literal["wall", "cpu"]


def clock(device: str = "cpu", kind: ClockKind = "wall") -> Clock:
    """The clock for a device: wall time (CUDA events on a GPU), or processor time of this process and its children.

    Raises:
        ConfigError: the device is neither 'cpu' nor a CUDA device that is there.
    """
    check_device(device)
    if kind == "cpu":
        return _cpu_clock
    return _cuda_clock if device == "cuda" else _wall_clock


def check_device(device: str) -> None:
    """Raises ConfigError unless benchmarks can run on `device` here and now."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"cannot measure on device {device!r}; valid: cpu, cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("cannot measure on device 'cuda': torch finds none; use --device cpu")


def cpu_seconds() -> tuple[float, float]:
    """Processor time so far in seconds, all threads: (this process, its children that have ended).

    `time.process_time` counts microseconds; for children there is only `os.times`, in ticks of 10 ms on Linux, which
    is enough for compilers that run for seconds.
    """
    times = os.times()
    return time.process_time(), times.children_user + times.children_system


def _wall_clock(call: Call, iterations: int) -> float:
    with _no_collector():
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        return (time.perf_counter() - start) / iterations


def _cpu_clock(call: Call, iterations: int) -> float:
    with _no_collector():
        start = sum(cpu_seconds())
        for _ in range(iterations):
            call()
        return (sum(cpu_seconds()) - start) / iterations


def _cuda_clock(call: Call, iterations: int) -> float:
    """Time on the GPU's own clock from the first kernel's turn to the last one's end, launch gaps included."""
    import torch

    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    with _no_collector():
        torch.cuda.synchronize()
        start.record()
        for _ in range(iterations):
            call()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / iterations


@contextmanager
def _no_collector() -> Iterator[None]:
    """Cycle collection falls on whoever allocates next, so it must run between samples and not within them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
