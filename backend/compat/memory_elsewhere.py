"""What a function allocates on CPU, told while a profiler of the program's own is running.

Torch's profiler of old keeps to the thread that starts it; the present one ends whichever is running.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def profiling() -> bool:
    """Whether the program profiles."""
    running = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(torch.autograd.profiler._is_profiler_enabled or (running is not None and running()))


def allocations_elsewhere(fn: Callable[[], Any]) -> list[int]:
    """Bytes that `fn` allocates, and releases (negative), in order; it is called once, in a thread of its own.

    Raises:
        RuntimeError: torch has no such profiler; or what `fn` raises.
    """
    threads = torch.get_num_threads()

    def run() -> list[int]:
        torch.set_num_threads(threads)  # kept for each thread
        return _allocations(fn)

    with ThreadPoolExecutor(1, "optpass-allocations") as pool:
        return pool.submit(run).result()


def _allocations(fn: Callable[[], Any]) -> list[int]:
    try:
        from torch._C._autograd import _disable_profiler_legacy
        from torch.autograd import profiler_legacy
    except ImportError as error:
        raise RuntimeError("torch has no profiler of a single thread") from error
    profiler_legacy.profile(enabled=True, profile_memory=True).__enter__()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        result = fn()
    finally:
        records: Any = _disable_profiler_legacy()
    del result
    return [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
