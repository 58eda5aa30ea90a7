"""An order of kernels that needs less memory: single kernels moved over the peak, as long as that lowers it.

Kernels and buffers are numbers here; whose they are, and how a new order gets to Inductor, is `compat.memory_order`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from optpass.backend.compat.memory_order import ScheduledBuffer

#: Orders that are tried, at most, and kernels in all of them together; and kernels that are moved together, at most.
TRIALS, EFFORT, TOGETHER = 4000, 2_000_000, 12
#: Steps within this part of the peak count as peaks too: to lower one of two is progress.
NEAR = 0.97

Ints = NDArray[np.int64]


class Kernels:
    """A schedule: its kernels in their present order, what must precede what, and the buffers.

    Args:
        before: for each kernel, those that must run before it.
        buffers: everything that is allocated or released.
        overwrites: for each kernel, whether it can write its result over an input of the same size that it is the last
            to read.
    """

    def __init__(
        self, before: Sequence[frozenset[int]], buffers: Sequence[ScheduledBuffer], overwrites: Sequence[bool]
    ) -> None:
        self.n, self.before, self.buffers = len(before), before, buffers
        self.after: list[set[int]] = [set() for _ in before]
        for kernel, needed in enumerate(before):
            for other in needed:
                self.after[other].add(kernel)
        self._made = np.array([b.made for b in buffers], dtype=np.int64)
        self._freed = np.array([0 if b.returned else b.freed for b in buffers], dtype=np.int64)
        self.lasting = np.array([b.returned for b in buffers], dtype=bool)
        self._producer = np.array([b.producer for b in buffers], dtype=np.int64)
        users = [b.users or ((b.producer,) if b.producer >= 0 else (0,)) for b in buffers]
        self._users = np.array([u for some in users for u in some], dtype=np.int64)
        self._first = np.cumsum([0, *(len(some) for some in users)])[:-1].astype(np.int64)
        made_by: dict[int, list[int]] = {}
        for buffer in buffers:
            if buffer.producer >= 0:
                made_by.setdefault(buffer.producer, []).append(buffer.made)
        pairs = [
            (i, kernel)
            for i, b in enumerate(buffers)
            for kernel in b.users
            if b.freed and not b.returned and overwrites[kernel] and b.freed in made_by.get(kernel, ())
        ]
        self._pair_buffer = np.array([i for i, _ in pairs], dtype=np.int64)
        self._pair_kernel = np.array([k for _, k in pairs], dtype=np.int64)
        self._overwritten = np.array(
            [sum(made_by.get(k, ())) if overwrites[k] else 0 for k in range(self.n)], dtype=np.int64
        )

    def live(self, order: Sequence[int]) -> Ints:
        """Bytes during each kernel of `order`."""
        position, start, end = self.spans(order)
        change = np.zeros(self.n + 1, dtype=np.int64)
        np.add.at(change, start, self._made)
        np.add.at(change, end + 1, -self._freed)
        live: Ints = np.cumsum(change)[: self.n]
        if len(self._pair_buffer):
            at = position[self._pair_kernel]
            dies = end[self._pair_buffer] == at
            saved = np.zeros(self.n, dtype=np.int64)
            np.add.at(saved, at[dies], self._freed[self._pair_buffer[dies]])
            live = live - np.minimum(saved, self._overwritten[np.asarray(order)])
        return live

    def spans(self, order: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """The position of each kernel, and the first and the last position of each buffer."""
        position = np.empty(self.n, dtype=np.int64)
        position[np.asarray(order)] = np.arange(self.n)
        start = np.where(self._producer < 0, 0, position[self._producer])
        end = np.maximum.reduceat(position[self._users], self._first)
        return position, start, end


def peak_of(kernels: Kernels, order: Sequence[int]) -> int:
    """Most bytes at one time in `order`."""
    return int(kernels.live(order).max(initial=0))


def least_peak(
    before: Sequence[frozenset[int]],
    buffers: Sequence[ScheduledBuffer],
    overwrites: Sequence[bool],
    other: Sequence[int] = (),
) -> list[int]:
    """The order that a schedule is run in: as for `Kernels`, whose present order is 0, 1, 2, ..., and `improved`."""
    return improved(Kernels(before, buffers, overwrites), other)


def improved(kernels: Kernels, other: Sequence[int] = (), trials: int = TRIALS) -> list[int]:
    """An order of the same kernels whose peak is at most the present one's, and that of `other`, if there is one."""
    order = list(range(kernels.n))
    if not kernels.n or not kernels.buffers:
        return order
    if other and _badness(kernels.live(other)) < _badness(kernels.live(order)):
        order = list(other)
    live = kernels.live(order)
    best = _badness(live)
    trials = min(trials, EFFORT // kernels.n)
    while trials > 0:
        found = None
        for moved in _moves(kernels, order, int(np.argmax(live))):
            trials -= 1
            after = kernels.live(moved)
            badness = _badness(after)
            if badness < best:
                best, found, live = badness, moved, after
            if trials <= 0:
                break
        if found is None:
            break
        order = found
    return order


def _badness(live: Ints) -> tuple[int, int]:
    """The peak, and what stands near it: of two orders with one peak, that with fewer kernels at it is better."""
    peak = int(live.max(initial=0))
    return peak, int(np.maximum(live - int(peak * NEAR), 0).sum())


def _moves(kernels: Kernels, order: list[int], at: int) -> Iterator[list[int]]:
    """Orders in which something that lives at position `at` is made behind it, or is used up before it."""
    position, start, end = kernels.spans(order)
    where = position.tolist()
    seen: set[tuple[bool, frozenset[int]]] = set()
    alive = np.nonzero((start < at) & ((end > at) | kernels.lasting))[0]
    for i in sorted(alive.tolist(), key=lambda b: -kernels.buffers[b].freed):
        buffer = kernels.buffers[i]
        if buffer.producer >= 0 and not any(where[u] <= at for u in buffer.users):
            yield from _moved(order, _closure(kernels.after, {buffer.producer}, where, 0, at), at, True, seen)
        if not buffer.returned:
            late = {u for u in buffer.users if where[u] > at}
            yield from _moved(order, _closure(kernels.before, late, where, at, kernels.n), at, False, seen)


def _closure(
    towards: Sequence[set[int] | frozenset[int]], start: set[int], where: list[int], low: int, high: int
) -> set[int] | None:
    """`start` and all that has to move with it between two positions; None if that is too much, or at either."""
    found, stack = set(start), list(start)
    while stack:
        for other in towards[stack.pop()]:
            if low <= where[other] <= high and other not in found:
                found.add(other)
                stack.append(other)
        if len(found) > TOGETHER:
            return None
    return found


def _moved(
    order: list[int], kernels: set[int] | None, at: int, later: bool, seen: set[tuple[bool, frozenset[int]]]
) -> Iterator[list[int]]:
    """`order` with `kernels` just behind position `at`, or just before it."""
    if not kernels or order[at] in kernels:
        return
    key = later, frozenset(kernels)
    if key in seen:
        return
    seen.add(key)
    left = [k for k in order[:at] if k not in kernels]
    right = [k for k in order[at + 1 :] if k not in kernels]
    between = [k for k in order if k in kernels]
    here = [order[at]]
    yield left + here + between + right if later else left + between + here + right
