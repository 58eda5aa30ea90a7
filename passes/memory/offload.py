"""Which saved tensors could go to host memory and come back without the step waiting for them.

An analysis over a plan: copies leave over one direction of the link as soon as the forward has used a tensor for the
last time, and come back over the other before the backward first reads it. Nothing here moves anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpass.passes.memory.search.schedule import Schedule, Timeline

#: Part of a link's datasheet rate that a pinned copy reaches: 25 GB/s of 31.5 on PCIe 4.0 x16 (NVIDIA bandwidthTest).
LINK_EFFICIENCY = 0.8
#: Tensors below this many bytes cost more in bookkeeping than they free.
SMALLEST = 1 << 20


@dataclass(frozen=True)
class Offloaded:
    """One saved tensor that could be moved.

    Attributes:
        storage: its storage.
        bytes: of it.
        transfer_s: seconds on the link, both ways together.
    """

    storage: int
    bytes: int
    transfer_s: float


@dataclass(frozen=True)
class _Idle:
    """A saved storage and when the step does without it, in seconds from the start of the forward."""

    storage: int
    bytes: int
    free_from: float
    needed_at: float


def hidden_offloads(schedule: Schedule, timeline: Timeline, link_bytes_per_s: float) -> tuple[Offloaded, ...]:
    """Saved tensors whose transfers are hidden behind computing, in the order in which they leave.

    Copies queue on each direction of the link: outwards in the order in which the forward lets go, back in the order
    in which the backward asks. A tensor is taken only where all transfers chosen so far still end in time.

    Args:
        link_bytes_per_s: rate of the link to the host, per direction.
    """
    rate = link_bytes_per_s * LINK_EFFICIENCY
    chosen: list[_Idle] = []
    for item in sorted(_idle(schedule, timeline), key=lambda i: (i.free_from - i.needed_at, i.storage)):
        if item.bytes >= SMALLEST and _in_time([*chosen, item], rate):
            chosen.append(item)
    chosen.sort(key=lambda i: (i.free_from, i.storage))
    return tuple(Offloaded(i.storage, i.bytes, 2 * i.bytes / rate) for i in chosen)


def _in_time(items: Sequence[_Idle], rate: float) -> bool:
    """Whether every tensor is out before it has to start coming back, and back before it is needed."""
    gone: dict[int, float] = {}
    free = 0.0
    for item in sorted(items, key=lambda i: (i.free_from, i.storage)):
        free = max(free, item.free_from) + item.bytes / rate
        gone[item.storage] = free
    start = float("inf")
    # From the last to be needed to the first, each as late as the ones after it allow.
    for item in sorted(items, key=lambda i: (-i.needed_at, -i.storage)):
        start = min(start, item.needed_at) - item.bytes / rate
        if gone[item.storage] > start:
            return False
    return True


def _idle(schedule: Schedule, timeline: Timeline) -> list[_Idle]:
    operations = schedule.operations
    ends: list[float] = []
    now = 0.0
    for index in schedule.order:
        now += operations[index].seconds
        ends.append(now)
    starts: list[float] = []
    for index in timeline.steps:
        starts.append(now)
        now += operations[index].seconds
    held = set(schedule.problem.forward_outputs)
    found = []
    for s, instance in timeline.saved.items():
        if s in held or s not in schedule.forward_last or not timeline.uses[instance]:
            continue
        free_from = ends[schedule.forward_last[s]]
        found.append(_Idle(s, schedule.problem.storages[s].bytes, free_from, starts[timeline.uses[instance][0]]))
    return found
