"""Which saved tensors go to host memory and come back without the step waiting for them.

Copies leave over one direction of the link from when the forward has made a tensor, and come back over the other before
the backward first reads it. A tensor's memory is the device's until it is copied and the forward has used it for the
last time, and again from when it begins to come back: a `Timeline` with such tensors counts it so. A tensor goes only
where it is out by the end of the forward and need not come back before the backward begins, so that nothing that the
caller does between the two counts on the link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from optpass.passes.memory.search.schedule import Schedule, Timeline
from optpass.passes.memory.search.timeline import Offloaded as Offloaded

#: Part of a link's datasheet rate that a pinned copy reaches: 25 GB/s of 31.5 on PCIe 4.0 x16 (NVIDIA bandwidthTest).
LINK_EFFICIENCY = 0.8
#: Tensors below this many bytes cost more in bookkeeping than they free.
SMALLEST = 1 << 20


def _always(storage: int) -> bool:
    return True


@dataclass(frozen=True)
class Host:
    """Where tensors can go.

    Attributes:
        link_bytes_per_s: rate of the link to it, per direction, by the datasheet.
        memory_bytes: that copies may take there.
        may: whether a storage can be moved at all.
    """

    link_bytes_per_s: float
    memory_bytes: float = inf
    may: Callable[[int], bool] = _always

    @property
    def rate(self) -> float:
        """Bytes per second that a copy reaches."""
        return self.link_bytes_per_s * LINK_EFFICIENCY

    def takes(self, items: Sequence[_Idle]) -> bool:
        """Whether it has memory for all of them; torch pins blocks of powers of two."""
        return sum(1 << (item.bytes - 1).bit_length() for item in items) <= self.memory_bytes


@dataclass(frozen=True)
class _Idle:
    """A saved storage that the step does without for a while.

    Attributes:
        made, used: position in the forward that makes it, and that of its last use there.
        read: step of the backward that first reads it.
        seconds: from its last use to that.
    """

    storage: int
    bytes: int
    made: int
    used: int
    read: int
    seconds: float


@dataclass(frozen=True)
class _Clock:
    """When each operation of the forward ends and each step of the backward begins, seconds from the start."""

    ends: Sequence[float]
    starts: Sequence[float]

    @property
    def between(self) -> float:
        """The end of the forward."""
        return self.ends[-1] if self.ends else 0.0

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline) -> _Clock:
        """That of a plan; the caller's part between the halves takes no time."""
        seconds = [o.seconds for o in schedule.operations]
        ends = list(accumulate(seconds[i] for i in schedule.order))
        between = ends[-1] if ends else 0.0
        return cls(ends, list(accumulate((seconds[i] for i in timeline.steps), initial=between))[:-1])


def hidden_offloads(schedule: Schedule, timeline: Timeline, host: Host) -> tuple[Offloaded, ...]:
    """Saved tensors whose transfers are hidden behind computing, in the order in which they come back.

    Copies queue on each direction of the link: outwards in the order in which the forward makes the tensors, back in
    the order in which the backward asks. Those that are idle longest come first; one is taken only where all transfers
    chosen so far still end in time. Tensors that the plan has in host memory already are not asked about.
    """
    clock = _Clock.of(schedule, timeline)
    return _placed(_hidden(schedule, timeline, clock, host), clock, host.rate)


def least_offloaded(schedule: Schedule, timeline: Timeline, host: Host, peak: int) -> Timeline | None:
    """The plan with hidden offloads, as few as bring its peak down to `peak` bytes; None where all do not."""
    clock = _Clock.of(schedule, timeline)

    def counted(items: Sequence[_Idle]) -> Timeline:
        return moved(timeline, _placed(items, clock, host.rate))

    chosen = _hidden(schedule, timeline, clock, host)
    if counted(chosen).peak > peak:
        return None
    for item in sorted(chosen, key=lambda i: (i.seconds, i.storage)):  # those that have least time first
        fewer = [other for other in chosen if other is not item]
        if counted(fewer).peak <= peak:
            chosen = fewer
    return counted(chosen)


def moved(timeline: Timeline, items: Sequence[Offloaded]) -> Timeline:
    """The plan with `items` in host memory between forward and backward."""
    forward, backward, boundary = timeline.forward.copy(), timeline.backward.copy(), timeline.boundary
    for item in items:
        forward[item.gone + 1 :] -= item.bytes
        boundary -= item.bytes
        backward[: item.back] -= item.bytes
    peak = max(int(forward.max(initial=0)), boundary, int(backward.max(initial=0)))
    return replace(timeline, forward=forward, backward=backward, boundary=boundary, peak=peak, offloaded=tuple(items))


def _hidden(schedule: Schedule, timeline: Timeline, clock: _Clock, host: Host) -> list[_Idle]:
    chosen: list[_Idle] = []
    for item in sorted(_idle(schedule, timeline, clock), key=lambda i: (-i.seconds, i.storage)):
        if item.bytes < SMALLEST or not host.may(item.storage):
            continue
        more = [*chosen, item]
        if host.takes(more) and _times(more, clock, host.rate) is not None:
            chosen = more
    return chosen


def _times(items: Sequence[_Idle], clock: _Clock, rate: float) -> dict[int, tuple[float, float]] | None:
    """When each tensor is out, and when it begins to come back; None where one of them would be late."""
    out: dict[int, float] = {}
    free = 0.0
    for item in sorted(items, key=lambda i: (i.made, i.storage)):
        free = out[item.storage] = max(free, clock.ends[item.made]) + item.bytes / rate
    if free > clock.between:
        return None
    found: dict[int, tuple[float, float]] = {}
    start = float("inf")
    # From the last to be needed to the first, each as late as the ones after it allow.
    for item in sorted(items, key=lambda i: (-i.read, -i.storage)):
        start = min(start, clock.starts[item.read]) - item.bytes / rate
        found[item.storage] = out[item.storage], start
    return found if start >= clock.between else None


def _placed(items: Sequence[_Idle], clock: _Clock, rate: float) -> tuple[Offloaded, ...]:
    times = _times(items, clock, rate)
    assert times is not None  # all of a choice that is hidden are, and so are fewer of them
    found = []
    for item in sorted(items, key=lambda i: (i.read, i.storage)):
        out, start = times[item.storage]
        gone = max(item.used, bisect_left(clock.ends, out))
        back = min(item.read, bisect_right(clock.starts, start) - 1)
        found.append(Offloaded(item.storage, item.bytes, 2 * item.bytes / rate, item.made, gone, back, item.read))
    return tuple(found)


def _idle(schedule: Schedule, timeline: Timeline, clock: _Clock) -> list[_Idle]:
    place = {index: position for position, index in enumerate(schedule.order)}
    there = {item.storage for item in timeline.offloaded}
    there.update(schedule.problem.forward_outputs, schedule.problem.backward_outputs)
    found = []
    for s, instance in timeline.saved.items():
        storage = schedule.problem.storages[s]
        if s in there or s not in schedule.forward_last or not timeline.uses[instance]:
            continue
        made, used, read = place[storage.producer], schedule.forward_last[s], timeline.uses[instance][0]
        found.append(_Idle(s, storage.bytes, made, used, read, clock.starts[read] - clock.ends[used]))
    return found
