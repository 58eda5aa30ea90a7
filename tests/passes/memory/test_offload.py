"""Which saved tensors can leave and come back in time, on a step whose times are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optpass.passes.memory import offload
from optpass.passes.memory.offload import LINK_EFFICIENCY, Host, hidden_offloads, least_offloaded, moved
from optpass.passes.memory.search.search import Search

M = 1 << 20


def step(seconds: list[float], sizes: list[int]) -> tuple[Any, Any]:
    """Operation i makes storage i in the forward; the backward reads them in reverse, each by an operation as long."""
    n = len(sizes)
    operations = [SimpleNamespace(seconds=s) for s in [*seconds, *reversed(seconds)]]
    storages = [SimpleNamespace(bytes=size, producer=i) for i, size in enumerate(sizes)]
    problem = SimpleNamespace(forward_outputs=(), backward_outputs=(), storages=storages)
    schedule = SimpleNamespace(
        operations=operations, order=list(range(n)), problem=problem, forward_last={i: i for i in range(n)}
    )
    timeline = SimpleNamespace(
        steps=list(range(n, 2 * n)),
        saved={i: i for i in range(n)},
        uses=[[n - 1 - i] for i in range(n)],
        offloaded=(),
    )
    return schedule, timeline


def chosen(seconds: list[float], sizes: list[int], rate: float, host_bytes: float = 1e12) -> list[int]:
    schedule, timeline = step(seconds, sizes)
    host = Host(rate / LINK_EFFICIENCY, host_bytes)
    return sorted(item.storage for item in hidden_offloads(schedule, timeline, host))


def test_a_slow_link_moves_nothing_and_a_fast_one_all_but_the_last() -> None:
    seconds, sizes = [1.0] * 6, [4 * M] * 6
    assert chosen(seconds, sizes, 0.1 * M) == []
    # The last tensor is read at once; the one before it is idle for two operations.
    assert chosen(seconds, sizes, 1000 * M) == [0, 1, 2, 3, 4]


def test_transfers_queue_on_the_link() -> None:
    """4 MiB at 4 MiB/s take as long as an operation: the earlier a tensor is made, the longer it is idle."""
    found = chosen([1.0] * 6, [4 * M] * 6, 4 * M)
    assert found == [0, 1, 2, 3, 4]
    slower = chosen([1.0] * 6, [4 * M] * 6, 2 * M)
    assert slower and len(slower) < 5 and slower[0] == 0


def test_every_choice_is_in_time() -> None:
    import random

    rng = random.Random(3)
    for _ in range(50):
        n = rng.randrange(2, 12)
        seconds = [rng.uniform(0.1, 2) for _ in range(n)]
        sizes = [rng.randrange(M, 20 * M) for _ in range(n)]
        rate = rng.uniform(1, 40) * M
        schedule, timeline = step(seconds, sizes)
        found = {item.storage: item for item in hidden_offloads(schedule, timeline, Host(rate / LINK_EFFICIENCY))}
        ends = [sum(seconds[: i + 1]) for i in range(n)]
        starts = [ends[-1] + sum(seconds[n - k :]) for k in range(n)]
        free = 0.0
        for s in sorted(found):  # one after the other, as they are made
            free = max(free, ends[s]) + sizes[s] / rate
            assert free <= ends[found[s].gone] + 1e-9 and found[s].gone >= s == found[s].begins
        free = 0.0
        for s in sorted(found, reverse=True):  # back in the order in which they are read
            assert found[s].read == n - 1 - s and 0 <= found[s].back <= found[s].read
            free = max(free, starts[found[s].back]) + sizes[s] / rate
            assert free <= starts[found[s].read] + 1e-9


def test_the_host_has_memory_for_them() -> None:
    assert chosen([1.0] * 6, [3 * M] * 6, 1000 * M, 4 * M) == [0]  # torch pins 4 MiB for 3
    assert chosen([1.0] * 6, [3 * M] * 6, 1000 * M, 3.9 * M) == []


@pytest.mark.parametrize("name", ["stack", "outside", "chain", "branches"])
def test_a_moved_tensor_takes_memory_only_while_it_is_there(joints, programs, monkeypatch, name) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)
    search = Search(programs.problem_of(joints[name][2]))
    schedule, base = search.schedule, search.schedule.run(search.start)
    host = Host(1e11, may=lambda storage: storage % 3 > 0)
    items = hidden_offloads(schedule, base, host)
    assert items and all(host.may(item.storage) for item in items)
    line = moved(base, items)
    forward, backward = base.forward.copy(), base.backward.copy()
    for position in range(len(forward)):
        forward[position] -= sum(item.bytes for item in items if position > item.gone)
    for step_ in range(len(backward)):
        backward[step_] -= sum(item.bytes for item in items if step_ < item.back)
    boundary = base.boundary - sum(item.bytes for item in items)
    assert (line.forward == forward).all() and (line.backward == backward).all() and line.boundary == boundary
    assert line.peak == max(forward.max(), backward.max(), boundary) <= base.peak
    assert min(forward.min(), backward.min(), boundary) >= 0
    for item in items:
        instance = base.saved[item.storage]
        assert base.uses[instance][0] == item.read >= item.back
        assert schedule.forward_last[item.storage] <= item.gone < len(forward)
    part = (line.peak + base.peak) // 2
    fewer = least_offloaded(schedule, base, host, part)
    assert fewer is not None and fewer.peak <= part and len(fewer.offloaded) <= len(items)
    assert least_offloaded(schedule, base, host, line.peak - 1) is None
    assert not least_offloaded(schedule, base, host, base.peak).offloaded


def test_small_tensors_stay() -> None:
    assert chosen([1.0] * 3, [M - 1] * 3, 1000 * M) == []
