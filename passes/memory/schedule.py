"""From decisions to a timeline: what the backward runs in which order, and the bytes that are live at each step.

A state says which storages may be kept from the forward, and where a storage must not be held. The walk runs the
backward's operations in order and computes again, just before it is needed, whatever is not at hand; a value lives
from where it was made to its last use, so that nothing is held for longer than the state allows. The bytes are exact
for an executor that frees at last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from optpass.passes.memory.fused import Bytes, Fusion, Steps
from optpass.passes.memory.problem import Problem
from optpass.passes.memory.sequence import tightened

#: What is kept, and what is not held at which positions.
FrozenState = tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]


@dataclass
class State:
    """Decisions.

    Attributes:
        kept: storages of the forward that may be kept for the backward.
        evicted: by position of a backward operation: storages that are not held across it.
    """

    kept: set[int] = field(default_factory=set)
    evicted: dict[int, set[int]] = field(default_factory=dict)

    def copy(self) -> State:
        """An independent copy."""
        return State(set(self.kept), {p: set(v) for p, v in self.evicted.items()})

    def frozen(self) -> FrozenState:
        """The same, hashable, and written the same in every process."""
        evicted = tuple((p, tuple(sorted(v))) for p, v in sorted(self.evicted.items()) if v)
        return tuple(sorted(self.kept)), evicted

    @classmethod
    def thawed(cls, frozen: FrozenState) -> State:
        """From `frozen`."""
        return cls(set(frozen[0]), {p: set(v) for p, v in frozen[1]})


@dataclass(slots=True)
class Timeline:
    """One backward as it would run.

    Attributes:
        steps: operation of each step.
        anchors: position in the backward (`Schedule.anchors`) that each step belongs to.
        reads: for each step, the instance of each input.
        storage, birth, last: of each instance: its storage, the step that made it (-1: kept from the forward), and the
            last step that reads it, inside whatever kernel that is.
        uses: for each instance, the steps that read it, ascending.
        bytes: of each instance; 0 for one that is never stored.
        inside: for each step, whether its result is computed inside its readers.
        saved: storages kept from the forward, with their instances.
        forward, backward: bytes live during each operation of the forward, and during each step.
        boundary: bytes live between the two.
        peak: the largest of all.
        recomputed_s: time of the steps that are no backward operation.
    """

    steps: list[int]
    anchors: list[int]
    reads: list[tuple[int, ...]]
    storage: list[int]
    birth: list[int]
    last: list[int]
    uses: list[list[int]]
    saved: dict[int, int]
    forward: Bytes
    backward: Bytes
    boundary: int
    peak: int
    recomputed_s: float
    bytes: Bytes
    inside: list[bool]


class Schedule:
    """The timelines of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.operations = problem.operations
        self.sizes = np.array([s.bytes for s in problem.storages], dtype=np.int64)
        self.fusion = Fusion(problem.operations, self.sizes)
        self.order = [o.index for o in problem.operations if o.forward]
        self.given = [s.given and not s.tangent for s in problem.storages]
        self.tangents = [s.index for s in problem.storages if s.tangent]
        self._inputs = [tuple(s for s in o.inputs if not self.given[s]) for o in problem.operations]
        self._outputs = [o.outputs for o in problem.operations]
        self._seconds = [o.seconds for o in problem.operations]
        self._workspace = np.array([o.workspace for o in problem.operations], dtype=np.int64)
        self._producer = [s.producer for s in problem.storages]
        self._held, self._tangents = frozenset(problem.forward_outputs), frozenset(self.tangents)
        self._lent = np.isin(np.arange(len(self.sizes)), list(self._held))
        self._output_bytes = int(self.sizes[self._lent].sum())
        self._tangent_bytes = int(self.sizes[self.tangents].sum())
        self._forward_made = {s for i in self.order for s in self.operations[i].outputs}
        given = {s for s, there in enumerate(self.given) if there}
        backward = [o.index for o in problem.operations if o.backward]
        self.anchors = tightened(problem.operations, backward, self.sizes.tolist(), self._held | given)
        self._profile()

    # ---- the forward --------------------------------------------------------------------------------------------

    def _profile(self) -> None:
        """Bytes live during each forward operation if nothing were kept, and where each storage is last used."""
        made: dict[int, int] = {}
        uses: dict[int, list[int]] = {}
        for i, index in enumerate(self.order):
            for s in self._inputs[index]:
                uses[s].append(i)
            for s in self.operations[index].outputs:
                made[s], uses[s] = i, []
        value = {s: v for v, s in enumerate(made)}
        reads = [[value[s] for s in self._inputs[index]] for index in self.order]
        steps = Steps(self.order, list(made), list(made.values()), list(uses.values()), reads)
        stored = self.fusion.stored(steps, self._held)
        n = len(self.order)
        change = np.zeros(n + 1, dtype=np.int64)
        self.forward_last = dict(zip(made, stored.last.tolist(), strict=True))
        #: Position in the forward behind which keeping a storage takes bytes.
        self._kept_from: dict[int, int] = {}
        for (s, start), size in zip(made.items(), stored.bytes.tolist(), strict=True):
            change[start] += size
            change[n if s in self._held else self.forward_last[s] + 1] -= size
            self._kept_from[s] = start - 1 if stored.inside[start] else self.forward_last[s]
        self.forward_inside = {s for s, start in made.items() if stored.inside[start]}
        self._bare = np.cumsum(change)[:n] - stored.overwritten
        self._bare += self._workspace[self.order]

    def _forward(self, saved: Iterable[int]) -> Bytes:
        n = len(self.order)
        change = np.zeros(n + 1, dtype=np.int64)
        for s in saved:
            if s not in self._held and s in self.forward_last:
                change[self._kept_from[s] + 1] += self.sizes[s]
        change[n] = 0
        result: Bytes = self._bare + np.cumsum(change)[:n]
        return result

    # ---- the backward -------------------------------------------------------------------------------------------

    def run(self, state: State) -> Timeline:
        """The timeline of `state`."""
        walk = _Walk(self, state)
        walk.run()
        return self._measure(walk)

    def _measure(self, walk: _Walk) -> Timeline:
        saved = {s: i for i, s in enumerate(walk.storage[: walk.given]) if walk.uses[i] and s not in self._tangents}
        n = len(walk.steps)
        storage = np.array(walk.storage, dtype=np.int64)
        birth = np.array(walk.birth, dtype=np.int64)
        stored = self.fusion.stored(Steps(walk.steps, walk.storage, walk.birth, walk.uses, walk.reads), self._held)
        last, size = stored.last, stored.bytes
        if self.problem.tangents_held:
            last[np.isin(storage, self.tangents)] = n - 1
        change = np.zeros(n + 2, dtype=np.int64)
        live = (birth >= 0) | (last >= 0)
        if self.problem.outputs_held:
            live &= ~self._lent[storage]
        np.add.at(change, np.maximum(birth, 0)[live], size[live])
        np.add.at(change, last[live] + 1, -size[live])
        problem = self.problem
        outputs = self._output_bytes
        backward = np.cumsum(change)[:n] + (outputs if problem.outputs_held else 0) + problem.kept - stored.overwritten
        backward += self._workspace[walk.steps]
        forward = self._forward(saved)
        kept = sum(int(self.sizes[s]) for s in saved if s not in self._held)
        boundary = kept + outputs + self._tangent_bytes + problem.tail
        peak = max(int(forward.max(initial=0)), boundary, int(backward.max(initial=0)))
        return Timeline(
            walk.steps, walk.anchors, walk.reads, walk.storage, walk.birth, last.tolist(), walk.uses, saved, forward,
            backward, boundary, peak, walk.seconds, size, stored.inside,
        )  # fmt: skip


class _Walk:
    """One walk through the backward. Searches run thousands: what is done for each step is written in one place.

    Attributes:
        given: number of instances that are there before the first step; they come first.
        seconds: of the steps that are no backward operation.
    """

    def __init__(self, schedule: Schedule, state: State) -> None:
        self.schedule, self.state = schedule, state
        self.steps: list[int] = []
        self.anchors: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.storage = sorted((state.kept | schedule._held) & schedule._forward_made) + schedule.tangents
        self.given = len(self.storage)
        self.birth = [-1] * self.given
        self.uses: list[list[int]] = [[] for _ in self.storage]
        self.at_hand = {s: i for i, s in enumerate(self.storage)}
        self.seconds = 0.0

    def run(self) -> None:
        """The backward's operations in order, each behind what it needs."""
        evicted, held, at_hand = self.state.evicted, self.schedule._held, self.at_hand
        for position, anchor in enumerate(self.schedule.anchors):
            for s in evicted.get(position, ()):
                if s not in held:
                    at_hand.pop(s, None)
            self._at(position, anchor)

    def _at(self, position: int, anchor: int) -> None:
        """Run `anchor`, and before it what it reads and is not at hand, depth first, without Python's recursion."""
        schedule, at_hand, steps, storage, uses = self.schedule, self.at_hand, self.steps, self.storage, self.uses
        stack = [anchor]
        while stack:
            operation = stack[-1]
            for s in schedule._inputs[operation]:
                if s not in at_hand:
                    stack.append(schedule._producer[s])
                    break
            else:
                stack.pop()
                step = len(steps)
                steps.append(operation)
                self.anchors.append(position)
                reads = tuple([at_hand[s] for s in schedule._inputs[operation]])
                self.reads.append(reads)
                for instance in reads:
                    uses[instance].append(step)
                for s in schedule._outputs[operation]:
                    at_hand[s] = len(storage)
                    storage.append(s)
                    self.birth.append(step)
                    uses.append([])
                if operation != anchor:
                    self.seconds += schedule._seconds[operation]
