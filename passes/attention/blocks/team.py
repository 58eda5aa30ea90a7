"""Parts of one operator side by side, each on a thread of its own that waits for no other until all are done.

torch's threads wait for each other at the end of every operator. Attention in blocks is hundreds of short ones, and
where another process has one of the cores, each of them waits for the scheduler: on two threads beside one busy core it
took 4 to 15 times as long as flash attention, which waits once.

It is for long calls: torch's own threads spin for some milliseconds after an operator before they sleep (libgomp), on
cores that the workers want then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

#: Scores from which workers are as fast as operators that share their own work on a machine with nothing else to do: a
#: tenth of a second for two. At a quarter of them they take 1.1 to 1.3 times as long.
_LONG = 1 << 26
_LOCK = threading.Lock()
_TEAMS: dict[int, ThreadPoolExecutor] = {}


def workers(heads: int, scores: int) -> int:
    """How many share the heads of an attention; 1 leaves it to each operator to share its own work."""
    threads = torch.get_num_threads()
    return threads if heads >= threads and scores >= _LONG else 1


def share(work: Callable[[int, T], None], items: Sequence[T], threads: int) -> None:
    """Call `work(worker, item)` for all items; each worker, counted from 0, takes the next one when it is free.

    What `work` allocates is not seen by a profiler of the calling thread: memory that counts is to be handed to it.

    Args:
        threads: workers; 1 works here, with all threads that torch has.
    """
    if threads == 1:
        for item in items:
            work(0, item)
        return
    left, inference = _Queue(items), torch.is_inference_mode_enabled()

    def of_worker(worker: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # modes are of each thread
            for item in left:
                work(worker, item)

    team = _team(threads)
    futures = [team.submit(of_worker, worker) for worker in range(threads)]
    errors = [error for error in map(Future.exception, futures) if error is not None]  # all are waited for
    if errors:
        raise errors[0]


class _Queue(Iterator[T]):
    """Items, each given to whoever asks first."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items, self._lock = iter(items), threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


def _team(size: int) -> ThreadPoolExecutor:
    """Threads that live as long as the process: what libraries keep for each thread is made once."""
    with _LOCK:
        if size not in _TEAMS:
            _TEAMS[size] = _started(size)
        return _TEAMS[size]


def _started(size: int) -> ThreadPoolExecutor:
    there, threads = threading.Barrier(size + 1), torch.get_num_threads()
    team = ThreadPoolExecutor(size, "optpass-attention", initializer=_alone)
    for _ in range(size):
        team.submit(there.wait)
    there.wait()
    torch.set_num_threads(threads)  # the number is each thread's own, but for those that never asked: they get the last
    return team


def _alone() -> None:
    """This thread computes operators by itself."""
    torch.get_num_threads()  # what a thread takes over when it first asks comes before what is set
    torch.set_num_threads(1)


# A forked process has none of the threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_TEAMS.clear)
