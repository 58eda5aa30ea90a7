"""Orders of kernels: the same kernels, nothing before what it needs, never a larger peak, and a smaller one where a
single move gives it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from optpass.backend.compat.memory_order import ScheduledBuffer, _kernels
from optpass.backend.memory.partition.order import Kernels, improved, least_peak, peak_of


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
    order = improved(kernels, trials=400)
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


def test_another_order_is_begun_with_where_it_is_better() -> None:
    # 2 and 3 use up what 0 and 1 make.
    before = [frozenset(), frozenset(), frozenset({0}), frozenset({1})]
    buffers = [_buffer(100, 0, 2), _buffer(100, 1, 3), _buffer(1, 2, returned=True), _buffer(1, 3, returned=True)]
    kernels = Kernels(before, buffers, [False] * 4)
    assert improved(kernels, [0, 2, 1, 3], trials=0) == [0, 2, 1, 3]
    assert improved(kernels, [1, 0, 2, 3], trials=0) == [0, 1, 2, 3]


class _Scheduled:
    """A kernel of Inductor's, or a buffer of one, as far as its order is concerned."""

    def __init__(self, name: str, size: int, users: Sequence[_Scheduled], of: str = "") -> None:
        self.name, self.of, self.pred_nodes = name, of, ()
        self.size_alloc = self.size_free = size
        self.succ_nodes: Sequence[_Scheduled] = users
        self.mpi_node = self.mpi_buffer = self

    def get_outputs(self) -> list[_Scheduled]:
        return [self]

    def get_name(self) -> str:
        return self.name

    def get_aliases(self) -> list[str]:
        return [self.of] if self.of else []

    def is_extern(self) -> bool:
        return True


def test_a_view_that_an_operator_makes_takes_no_memory_and_holds_what_it_is_of() -> None:
    reader = _Scheduled("reader", 1, [])
    again = _Scheduled("again", 100, [reader], of="view")
    view = _Scheduled("view", 100, [again], of="base")
    base = _Scheduled("base", 100, [view])
    _, buffers, _ = _kernels([base, view, again, reader], {}, ["reader"])
    assert buffers == [ScheduledBuffer(100, 100, 0, (1, 2, 3)), ScheduledBuffer(1, 1, 3, (), True)]
    # A part of a `cat` is there before the whole.
    whole = _Scheduled("whole", 100, [reader])
    part = _Scheduled("part", 50, [whole], of="whole")
    _, buffers, _ = _kernels([part, whole, reader], {}, [])
    assert [b.made for b in buffers] == [50, 100, 1]
