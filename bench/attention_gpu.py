"""Cells of the attention benchmark on a GPU: processes compile side by side, and time one at a time.

Compiling for a GPU takes ten times as long as timing. On a CPU it would disturb what is timed beside it; here whoever
runs on the GPU holds a lock (`gpu_lock`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optpass.bench.environment import usable_cores
from optpass.bench.gpu_lock import lock_path
from optpass.bench.progress import Progress
from optpass.bench.result import BenchError
from optpass.bench.worker import Worker

#: Seconds that cells which have begun are given when the time is over.
GRACE_S = 40.0
#: Seconds that a cell may take, with compiling and waiting for its turn.
CELL_S = 300.0
#: Processes at most: each has a context on the GPU, and operands. Each has three processors for itself and its
#: compilers: a call of less than a millisecond is as long as the processor that makes it needs.
SIDE_BY_SIDE, PROCESSORS = 8, 3

Answer = Mapping[str, Any]


def measured(
    target: str, cells: Sequence[tuple[str, Mapping[str, Any]]], folder: str, ends: float, progress: Progress
) -> dict[str, Answer | BenchError]:
    """Call `target` for each cell, given with its name and the arguments; what it answers, or why it does not.

    Args:
        folder: for caches.
        ends: time by `time.monotonic` after which no cell begins; those are missing in the result. What has begun
            has `GRACE_S` more.
    """
    waiting: queue.SimpleQueue[tuple[str, Mapping[str, Any]]] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    found: dict[str, Answer | BenchError] = {}
    environ = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # each
    lock = lock_path()

    def work() -> None:
        with Worker(target, environ=environ, calls=1_000_000) as worker:
            while time.monotonic() < ends:
                try:
                    name, arguments = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    worker.timeout_s = max(1.0, min(CELL_S, ends + GRACE_S - time.monotonic()))
                    found[name] = worker.call(**arguments, lock=lock)
                except BenchError as error:
                    found[name] = error
                progress.step(name, 1)

    threads = [threading.Thread(target=work) for _ in range(max(1, min(SIDE_BY_SIDE, usable_cores() // PROCESSORS)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
