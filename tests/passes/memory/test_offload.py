"""Which saved tensors can leave and come back in time, on a step whose times are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optpass.passes.memory import offload
from optpass.passes.memory.offload import LINK_EFFICIENCY, hidden_offloads

M = 1 << 20


def step(seconds: list[float], sizes: list[int]) -> tuple[Any, Any]:
    """Operation i makes storage i in the forward; the backward reads them in reverse, each by an operation as long."""
    n = len(sizes)
    operations = [SimpleNamespace(seconds=s) for s in [*seconds, *reversed(seconds)]]
    problem = SimpleNamespace(forward_outputs=(), storages=[SimpleNamespace(bytes=size) for size in sizes])
    schedule = SimpleNamespace(
        operations=operations, order=list(range(n)), problem=problem, forward_last={i: i for i in range(n)}
    )
    timeline = SimpleNamespace(
        steps=list(range(n, 2 * n)), saved={i: i for i in range(n)}, uses=[[n - 1 - i] for i in range(n)]
    )
    return schedule, timeline


def moved(seconds: list[float], sizes: list[int], rate: float) -> list[int]:
    schedule, timeline = step(seconds, sizes)
    return [item.storage for item in hidden_offloads(schedule, timeline, rate / LINK_EFFICIENCY)]


def test_a_slow_link_moves_nothing_and_a_fast_one_all_but_the_last() -> None:
    seconds, sizes = [1.0] * 6, [4 * M] * 6
    assert moved(seconds, sizes, 0.1 * M) == []
    # The last tensor is read at once; the one before it is idle for two operations.
    assert moved(seconds, sizes, 1000 * M) == [0, 1, 2, 3, 4]


def test_transfers_queue_on_the_link() -> None:
    """4 MiB at 4 MiB/s take as long as an operation: the earlier a tensor is made, the longer it is idle."""
    found = moved([1.0] * 6, [4 * M] * 6, 4 * M)
    assert found == [0, 1, 2, 3, 4]
    slower = moved([1.0] * 6, [4 * M] * 6, 2 * M)
    assert slower and len(slower) < 5 and slower[0] == 0


def test_every_choice_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    rng = random.Random(3)
    for _ in range(50):
        n = rng.randrange(2, 12)
        seconds = [rng.uniform(0.1, 2) for _ in range(n)]
        sizes = [rng.randrange(M, 20 * M) for _ in range(n)]
        rate = rng.uniform(1, 40) * M
        schedule, timeline = step(seconds, sizes)
        chosen = {item.storage for item in hidden_offloads(schedule, timeline, rate / LINK_EFFICIENCY)}
        idle = {i.storage: i for i in offload._idle(schedule, timeline)}
        out, free = {}, 0.0
        for s in sorted(chosen, key=lambda s: idle[s].free_from):
            free = max(free, idle[s].free_from) + sizes[s] / rate
            out[s] = free
        back = float("inf")
        for s in sorted(chosen, key=lambda s: -idle[s].needed_at):
            back = min(back, idle[s].needed_at) - sizes[s] / rate
            assert out[s] <= back


def test_small_tensors_stay() -> None:
    assert moved([1.0] * 3, [M - 1] * 3, 1000 * M) == []
