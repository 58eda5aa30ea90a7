"""Orders of kernels: the same kernels, nothing before what it needs, never a larger peak, and a smaller one where a
single move gives it."""

from __future__ import annotations

import random

import pytest

from optpass.backend.compat.memory_order import ScheduledBuffer
from optpass.backend.memory.order import Kernels, improved, least_peak, peak_of


def _schedule(seed: int) -> Kernels:
    draw = random.Random(seed)
    n = draw.randint(1, 60)
    before = [frozenset(draw.sample(range(i), min(i, draw.randint(0, 3)))) for i in range(n)]
    users: dict[int, list[int]] = {i: [] for i in range(n)}
    for kernel, needed in enumerate(before):
        for other in needed:
            users[other].append(kernel)
    buffers = []
    for i in range(n):
        size = draw.choice([1, 4, 4, 16])
        buffers.append(ScheduledBuffer(size, size, i, tuple(users[i]), not users[i] or draw.random() < 0.1))
    buffers.append(ScheduledBuffer(8, 8, -1, tuple(draw.sample(range(n), min(n, 2)))))
    return Kernels(before, buffers, [draw.random() < 0.5 for _ in range(n)])


@pytest.mark.parametrize("seed", range(40))
def test_an_order_is_valid_and_no_worse(seed: int) -> None:
    kernels = _schedule(seed)
    order = improved(kernels, 400)
    place = {kernel: i for i, kernel in enumerate(order)}
    assert sorted(order) == list(range(kernels.n))
    assert all(place[other] < place[kernel] for kernel in place for other in kernels.before[kernel])
    assert peak_of(kernels, order) <= peak_of(kernels, range(kernels.n))


def _buffer(size: int, producer: int, *users: int, returned: bool = False) -> ScheduledBuffer:
    return ScheduledBuffer(size, size, producer, users, returned)


def test_a_large_input_is_used_up_before_the_peak() -> None:
    # 0: peak of its own; 1: turns the input of 100 bytes into 10.
    buffers = [_buffer(100, -1, 1), _buffer(50, 0, returned=True), _buffer(10, 1, returned=True)]
    assert least_peak([frozenset(), frozenset()], buffers, [False, False]) == [1, 0]


def test_what_is_read_late_is_made_late() -> None:
    # 0 makes 100 bytes that only 2 reads; 1 takes 60 and leaves nothing.
    buffers = [_buffer(100, 0, 2), _buffer(60, 1), _buffer(1, 2, returned=True)]
    before = [frozenset(), frozenset(), frozenset({0})]
    assert least_peak(before, buffers, [False] * 3) == [1, 0, 2]


def test_a_kernel_that_writes_over_its_input_needs_it_once() -> None:
    buffers = [_buffer(100, -1, 0), _buffer(100, 0, returned=True)]
    assert [peak_of(Kernels([frozenset()], buffers, [over]), [0]) for over in (False, True)] == [200, 100]
