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
        self._producer = [s.producer for s in problem.storages]
        self._held = frozenset(problem.forward_outputs)
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
        self._bare += np.array([self.operations[i].workspace for i in self.order], dtype=np.int64)

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
        for position, anchor in enumerate(self.anchors):
            walk.at(position, anchor)
        return self._measure(walk)

    def _measure(self, walk: _Walk) -> Timeline:
        tangents = set(self.tangents)
        saved = {s: i for i, s in enumerate(walk.storage) if walk.birth[i] < 0 and walk.uses[i] and s not in tangents}
        n = len(walk.steps)
        storage = np.array(walk.storage, dtype=np.int64)
        birth = np.array(walk.birth, dtype=np.int64)
        stored = self.fusion.stored(Steps(walk.steps, walk.storage, walk.birth, walk.uses, walk.reads), self._held)
        last, size = stored.last, stored.bytes
        if self.problem.tangents_held:
            last[np.isin(storage, self.tangents)] = n - 1
        change = np.zeros(n + 2, dtype=np.int64)
        lent = self._held if self.problem.outputs_held else frozenset()
        held = np.array([s in lent for s in walk.storage], dtype=bool)
        live = ~held & ~((birth < 0) & (last < 0))
        np.add.at(change, np.maximum(birth, 0)[live], size[live])
        np.add.at(change, last[live] + 1, -size[live])
        problem = self.problem
        outputs = int(self.sizes[list(self._held)].sum()) if self._held else 0
        backward = np.cumsum(change)[:n] + (outputs if lent else 0) + problem.kept - stored.overwritten
        backward += np.array([self.operations[i].workspace for i in walk.steps], dtype=np.int64)
        forward = self._forward(saved)
        kept = sum(int(self.sizes[s]) for s in saved if s not in self._held)
        boundary = kept + outputs + int(self.sizes[self.tangents].sum()) + problem.tail
        peak = max(int(forward.max(initial=0)), boundary, int(backward.max(initial=0)))
        again = sum(
            self.operations[i].seconds for i, a in zip(walk.steps, walk.anchors, strict=True) if self.anchors[a] != i
        )
        return Timeline(
            walk.steps, walk.anchors, walk.reads, walk.storage, walk.birth, last.tolist(), walk.uses, saved, forward,
            backward, boundary, peak, again, size, stored.inside,
        )  # fmt: skip


class _Walk:
    """The state of one walk through the backward."""

    def __init__(self, schedule: Schedule, state: State) -> None:
        self.schedule, self.state = schedule, state
        self.steps: list[int] = []
        self.anchors: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.storage: list[int] = []
        self.birth: list[int] = []
        self.uses: list[list[int]] = []
        self.at_hand: dict[int, int] = {}
        for s in sorted((state.kept | schedule._held) & schedule._forward_made):
            self.at_hand[s] = self._instance(s, -1)
        for s in schedule.tangents:
            self.at_hand[s] = self._instance(s, -1)

    def _instance(self, s: int, birth: int) -> int:
        self.storage.append(s)
        self.birth.append(birth)
        self.uses.append([])
        return len(self.storage) - 1

    def at(self, position: int, anchor: int) -> None:
        """Run the backward operation `anchor`, and before it what it needs."""
        for s in self.state.evicted.get(position, ()):
            if s not in self.schedule._held:
                self.at_hand.pop(s, None)
        self._need(anchor, position)
        self._execute(anchor, position)

    def _need(self, operation: int, position: int) -> None:
        """Compute what `operation` reads and is not at hand, depth first, without Python's recursion."""
        inputs, producer, at_hand = self.schedule._inputs, self.schedule._producer, self.at_hand
        stack = [(operation, 0)]
        while stack:
            current, i = stack.pop()
            needed = inputs[current]
            while i < len(needed):
                s = needed[i]
                i += 1
                if s not in at_hand:
                    stack.append((current, i))
                    stack.append((producer[s], 0))
                    break
            else:
                if current != operation:
                    self._execute(current, position)

    def _execute(self, operation: int, position: int) -> None:
        step = len(self.steps)
        self.steps.append(operation)
        self.anchors.append(position)
        reads = []
        for s in self.schedule._inputs[operation]:
            instance = self.at_hand[s]
            self.uses[instance].append(step)
            reads.append(instance)
        self.reads.append(tuple(reads))
        for s in self.schedule.operations[operation].outputs:
            self.at_hand[s] = self._instance(s, step)
