"""One timeline: what a backward runs, which values it makes and reads, and the bytes that are live meanwhile.

How one follows from decisions is `schedule`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optpass.passes.memory.search.fused import Bytes, Steps


@dataclass(frozen=True)
class Offloaded:
    """A saved storage that is in host memory between its last use in the forward and its first in the backward.

    Attributes:
        storage: its storage.
        bytes: of it.
        transfer_s: seconds on the link, both ways together.
        begins: position in the forward behind which its copy begins.
        gone: position in the forward behind which it takes no more of the device's memory.
        back: step of the backward before which its memory is there again, and is copied to.
        read: step that first reads it.
    """

    storage: int
    bytes: int
    transfer_s: float
    begins: int
    gone: int
    back: int
    read: int


@dataclass
class Timeline:
    """One backward as it would run. Of most that a search looks at, only the peak and the seconds are ever read: lists
    of values are made when they are asked for.

    Attributes:
        anchored: for each operation of the problem, 1 if it is one of `Schedule.anchors`.
        saved: storages kept from the forward, with their instances.
        forward, backward: bytes live during each operation of the forward, and during each step.
        boundary: bytes live between the two.
        peak: the largest of all.
        recomputed_s: time of the steps that are no backward operation.
        bytes: of each instance; 0 for one that is never stored.
        inside: for each step, whether its result is computed inside its readers.
        values: the steps with the instances that they make and read.
        lasts: `last`, as an array.
        offloaded: those of `saved` that are in host memory meanwhile, in the order in which they come back.
    """

    anchored: Bytes
    saved: dict[int, int]
    forward: Bytes
    backward: Bytes
    boundary: int
    peak: int
    recomputed_s: float
    bytes: Bytes
    inside: list[bool]
    values: Steps
    lasts: Bytes
    offloaded: tuple[Offloaded, ...] = ()

    @property
    def steps(self) -> Sequence[int]:
        """Operation of each step."""
        return self.values.operations

    @property
    def reads(self) -> Sequence[Sequence[int]]:
        """For each step, the instance of each input."""
        return self.values.reads

    @cached_property
    def anchors(self) -> list[int]:
        """Position in the backward (`Schedule.anchors`) that each step belongs to."""
        anchored = self.anchored[np.array(self.steps, dtype=np.int64)]
        return _list(np.cumsum(anchored) - anchored)

    @cached_property
    def storage(self) -> list[int]:
        """Storage of each instance."""
        return _list(self.values.storage)

    @cached_property
    def birth(self) -> list[int]:
        """Of each instance, the step that made it; -1: kept from the forward."""
        return _list(self.values.birth)

    @cached_property
    def last(self) -> list[int]:
        """Of each instance, the last step that reads it, inside whatever kernel that is."""
        return _list(self.lasts)

    @cached_property
    def uses(self) -> list[list[int]]:
        """For each instance, the steps that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.storage]
        for step, reads in enumerate(self.reads):
            for instance in reads:
                found[instance].append(step)
        return found


def _list(numbers: Bytes) -> list[int]:
    found: list[int] = numbers.tolist()
    return found
