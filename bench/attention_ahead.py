"""Compiling what the attention benchmark times on a GPU: side by side, into one cache, before anything is timed."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optpass.bench.environment import usable_cores
from optpass.bench.progress import Progress
from optpass.bench.result import BenchError
from optpass.bench.worker import Worker

#: Processes at a time, at most: each has a context on the GPU, and operands.
SIDE_BY_SIDE = 8


def environ(folder: str) -> Mapping[str, str]:
    """Of processes that share the compilers' caches in `folder`."""
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}


def compile_ahead(cells: Sequence[tuple[str, Any]], folder: str, seed: int, progress: Progress) -> None:
    """Compile the cases of all cells, given with their kinds. What fails here is compiled, or fails, where it is
    timed."""
    waiting: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)

    def work() -> None:
        with Worker("optpass.bench.attention_cell:build", environ=environ(folder), calls=1000) as worker:
            while True:
                try:
                    kind, cell = waiting.get_nowait()
                except queue.Empty:
                    return
                progress.step(f"{cell.name}: compiled ahead")
                with contextlib.suppress(BenchError):
                    worker.call(kind=kind, cell=asdict(cell), seed=seed)

    threads = [threading.Thread(target=work) for _ in range(max(1, min(SIDE_BY_SIDE, usable_cores() // 2)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
