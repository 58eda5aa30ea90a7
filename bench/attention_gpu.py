"""Cells of the attention benchmark on a GPU: processes compile side by side, and time one at a time.

Compiling for a GPU takes ten times as long as timing. On a CPU it would disturb what is timed beside it; here whoever
runs on the GPU holds a lock (`gpu_lock`). Where a call is as short as the processor needs to make it, compiling
disturbs that, too: such cells are compiled first, several in each process, and timed while nothing else runs. What the
memory did not hold beside the other processes is called once more at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
#: Processes at most: each has a context on the GPU, and operands; and two processors, for itself and its compilers.
SIDE_BY_SIDE, PROCESSORS = 8, 2
#: Short cells that one process holds compiled: each compiles one function twice or three times, and Dynamo leaves what
#: it has compiled eight times in a process.
HELD = 3
#: What a cell is called for: all of it, compiling alone, or timing what was compiled.
WHOLE, COMPILE, TIME = "whole", "compile", "time"

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A cell's name, what the function that measures it is given, and whether its calls are short."""

    name: str
    arguments: Mapping[str, Any]
    short: bool


def measured(
    target: str, cells: Sequence[Cell], folder: str, ends: float, progress: Progress
) -> dict[str, Answer | BenchError]:
    """Call `target` for each cell; what it answers by their names, or why it does not.

    Args:
        folder: for caches.
        ends: time by `time.monotonic` after which no cell begins; those are missing in the result. What has begun
            has `GRACE_S` more.
    """
    environ = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # each
    with contextlib.ExitStack() as stack:
        count = max(1, min(SIDE_BY_SIDE, usable_cores() // PROCESSORS))
        workers = [stack.enter_context(Worker(target, environ=environ, calls=1_000_000)) for _ in range(count)]
        pool = _Pool(workers, ends, progress)
        for wave in _waves(cells, HELD * count):
            (pool.one_after_another if wave[0].short else pool.side_by_side)(wave)
        pool.again(cells)
    return pool.found


def _waves(cells: Sequence[Cell], most: int) -> Iterator[list[Cell]]:
    """Cells in their order: all that follow each other and are not short, and up to so many that are."""
    for short, run in itertools.groupby(cells, key=lambda cell: cell.short):
        listed = list(run)
        size = most if short else len(listed)
        yield from (listed[at : at + size] for at in range(0, len(listed), size))


@dataclass
class _Pool:
    workers: Sequence[Worker]
    ends: float
    progress: Progress
    found: dict[str, Answer | BenchError] = field(default_factory=dict)
    lock: str = field(default_factory=lock_path)

    def side_by_side(self, cells: Sequence[Cell]) -> None:
        """Each process goes from one cell to the next."""
        waiting = _queue(cells)

        def work(worker: Worker) -> None:
            for cell in self._next(waiting):
                self.found[cell.name] = self._call(worker, cell, WHOLE)
                self.progress.step(cell.name, 1)

        _at_once(work, self.workers)

    def one_after_another(self, cells: Sequence[Cell]) -> None:
        """All are compiled before the first is timed."""
        waiting = _queue(cells)
        compiled: dict[str, Worker] = {}

        def work(worker: Worker) -> None:
            for cell in itertools.islice(self._next(waiting), HELD):
                answer = self._call(worker, cell, COMPILE)
                if isinstance(answer, BenchError):
                    self.found[cell.name] = answer
                else:
                    compiled[cell.name] = worker

        _at_once(work, self.workers)
        for cell in cells:
            if cell.name in compiled:
                self.found[cell.name] = self._call(compiled[cell.name], cell, TIME)
            self.progress.step(cell.name, 1)

    def again(self, cells: Sequence[Cell]) -> None:
        """Cells that the memory did not hold, while nobody else takes any of it. What fails then changes no answer."""
        for cell in cells:
            before = self.found.get(cell.name)
            if time.monotonic() >= self.ends or not _lacked_memory(before):
                continue
            self.progress.step(f"{cell.name}: again, alone")
            answer = self._call(self.workers[0], cell, WHOLE)
            if isinstance(before, BenchError) or not isinstance(answer, BenchError):
                self.found[cell.name] = answer

    def _next(self, waiting: queue.SimpleQueue[Cell]) -> Iterator[Cell]:
        while time.monotonic() < self.ends:
            try:
                yield waiting.get_nowait()
            except queue.Empty:
                return

    def _call(self, worker: Worker, cell: Cell, part: str) -> Answer | BenchError:
        worker.timeout_s = max(1.0, min(CELL_S, self.ends + GRACE_S - time.monotonic()))
        try:
            answer: Answer = worker.call(**cell.arguments, part=part, lock=self.lock)
        except BenchError as error:
            return error
        return answer


def _lacked_memory(answer: Answer | BenchError | None) -> bool:
    return "OutOfMemoryError" in str(answer) if isinstance(answer, BenchError) else bool(answer and answer["left_out"])


def _queue(cells: Sequence[Cell]) -> queue.SimpleQueue[Cell]:
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    return waiting


def _at_once(work: Any, workers: Sequence[Worker]) -> None:
    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
