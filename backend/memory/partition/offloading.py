"""Offload to host memory as a third choice beside saving and computing again: plans that compute less again, and have
saved tensors in host memory meanwhile.

Which tensors can be there without the step waiting for them is `passes.memory.offload`'s to say. Here the plans of the
search are walked from the fastest on, and the first that fits with such tensors away is carried out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import fx

from optpass.backend.compat import runs_beside
from optpass.backend.memory.partition.choose import Trial
from optpass.backend.memory.replay.graph_values import hint
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory.emit import bases_of
from optpass.passes.memory.offload import SMALLEST, Host, least_offloaded
from optpass.passes.memory.problem import Problem
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search
from optpass.passes.memory.storage import nbytes, written_argument
from optpass.passes.memory.transfers import is_copyable

#: Types of device whose memory is not the host's, and whose copies to it run beside their computing.
DEVICES = frozenset({"cuda"})
#: Plans that are carried out, at most, each after what the one before needed more than was counted.
TRIES = 4
#: Launches that one tensor costs beside its transfers: two copies, and two waits for them.
LAUNCHES = 4
#: The part of the host's free memory that copies may take: the step may run again before its backward.
HOST_PART = 0.5


def host_of(joint: fx.GraphModule, problem: Problem, device: DeviceSpec) -> Host | None:
    """Where the saved tensors of a joint graph can go; None where they stay.

    Args:
        joint: forward and backward together.
        problem: of it.
        device: what it runs on.
    """
    link = device.pcie_bytes_per_s
    values = [n.meta.get("val") for n in joint.graph.nodes]
    large = [v for v in values if isinstance(v, torch.Tensor) and nbytes(v, hint) >= SMALLEST]
    places = {value.device for value in large}
    if link is None or len(places) != 1 or not all(place.type in DEVICES for place in places) or not runs_beside():
        return None
    memory = HOST_PART * free_host_memory() / max(1, torch.cuda.device_count())
    return Host(link, memory, movable(joint.graph, problem).__contains__)


class Walk:
    """The plans of a search from the fastest on, with tensors in host memory.

    Args:
        search: the plans.
        host: where tensors go.
        launch_s: seconds of a kernel launch.
    """

    def __init__(self, search: Search, host: Host, launch_s: float) -> None:
        self.search, self.host, self.launch_s = search, host, launch_s
        self._peaks = [peak for peak, _ in search.frontier()]
        self._plans: dict[int, Timeline] = {}

    def fastest(self, peak: int, known: float | None) -> Timeline | None:
        """The fastest plan that is found within `peak` bytes above the statics; None where one without offload that
        takes `known` seconds of recomputing is as good, or none is found."""
        chosen = _first(len(self._peaks), lambda place: self._moved(place, peak))
        if chosen is None or not chosen.offloaded:
            return None
        cost = chosen.recomputed_s + LAUNCHES * self.launch_s * len(chosen.offloaded)
        return chosen if known is None or cost < known else None

    def _moved(self, place: int, peak: int) -> Timeline | None:
        if place not in self._plans:
            found = self.search.at_most(self._peaks[place])
            assert found is not None  # the frontier has plans of these peaks
            self._plans[place] = found[1]
        return least_offloaded(self.search.schedule, self._plans[place], self.host, peak)


def offloaded(walk: Walk, carry_out: Callable[[Timeline], Trial], room: int, found: Trial) -> Trial | None:
    """The fastest plan found that fits `room` bytes with saved tensors in host memory; None where `found` is as good.

    Args:
        carry_out: makes a trial of a plan.
        found: without offload; it need not fit.
    """
    known = found.timeline.recomputed_s if found.peak <= room else None
    target = room - max(0, found.peak - found.timeline.peak)
    for _ in range(TRIES):
        chosen = walk.fastest(target, known)
        if chosen is None:
            return None
        trial = carry_out(chosen)
        if trial.replay.unsound:
            return None
        if trial.peak <= room:
            return trial
        target = min(target, chosen.peak) - (trial.peak - room)
    return None


def _first(n: int, moved: Callable[[int], Timeline | None]) -> Timeline | None:
    """Of plans by falling peak the first that fits once tensors are moved, by halving: mostly those behind it do."""
    found = moved(0)
    if found is not None:
        return found
    first, last = 0, n
    while first + 1 < last:
        middle = (first + last) // 2
        one = moved(middle)
        if one is None:
            first = middle
        else:
            last, found = middle, one
    return found


def movable(graph: fx.Graph, problem: Problem) -> frozenset[int]:
    """Storages of a joint graph that a copy can stand for: one dense tensor that the forward makes, and nobody writes
    to later."""
    written = {s for node in graph.nodes if (w := written_argument(node)) for s in problem.storage_of.get(w, ())}
    found = set()
    for s, base in bases_of(graph, problem).items():
        storage, value = problem.storages[s], base.meta["val"]
        made = storage.producer >= 0 and problem.operations[storage.producer].forward
        whole = nbytes(value, hint) <= storage.bytes < nbytes(value, hint) + SMALLEST
        if made and whole and s not in written and is_copyable(value):
            found.add(s)
    return frozenset(found)


def free_host_memory() -> int:
    """Bytes that this process could still have: of the machine, and of the group that it runs in."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = next(row for row in Path("/proc/meminfo").read_text().splitlines() if row.startswith("MemAvailable"))
        found = [int(line.split()[1]) << 10]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(int(limit) - int(used))
    return max(0, min(found))
