"""From decisions to a timeline: what the backward runs in which order, and the bytes that are live at each step.

A state says which storages may be kept from the forward, and where a storage must not be held. The walk runs the
backward's operations in order and computes again, just before it is needed, whatever is not at hand; a value lives
from where it was made to its last use, so that nothing is held for longer than the state allows. The bytes are exact
for an executor that frees at last use.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpass.passes.memory.problem import Problem
from optpass.passes.memory.search.fused import Bytes, Fusion, Steps
from optpass.passes.memory.search.sequence import tightened
from optpass.passes.memory.search.timeline import Timeline as Timeline

#: What is kept, and what is not held at which positions.
FrozenState = tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]

#: Timelines of one graph whose figures are remembered: some 300 bytes each.
MOST_TRIED = 30_000


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

    def key(self, *beside: bool) -> bytes:
        """The same for states of which one timeline follows, and what holds `beside`."""
        evicted = sorted((position, *sorted(gone)) for position, gone in self.evicted.items() if gone)
        parts = [sorted(self.kept), *evicted]
        numbers = array("q", chain(beside, map(len, parts), *parts))
        return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()

    def frozen(self) -> FrozenState:
        """The same, hashable, and written the same in every process."""
        evicted = tuple((p, tuple(sorted(v))) for p, v in sorted(self.evicted.items()) if v)
        return tuple(sorted(self.kept)), evicted

    @classmethod
    def thawed(cls, frozen: FrozenState) -> State:
        """From `frozen`."""
        return cls(set(frozen[0]), {p: set(v) for p, v in frozen[1]})


class Figures(NamedTuple):
    """What a search compares timelines by: of states that were tried, only these are kept.

    Attributes:
        steps: how many the backward has.
        seconds: of what it computes again.
        forward, backward: the most bytes that are live in each, without those of the problem's `early` and `kept`.
        held: bytes live between the two, without those of its `tail`.
    """

    steps: int
    seconds: float
    forward: int
    backward: int
    held: int


class Schedule:
    """The timelines of one problem.

    Args:
        problem: the step; what it has between its halves may be changed.
        tried: figures of the timelines of an equal graph, by state, for this one to read and add to.
    """

    def __init__(self, problem: Problem, tried: dict[bytes, Figures] | None = None) -> None:
        self.problem = problem
        self._tried: dict[bytes, Figures] = {} if tried is None else tried
        self.operations = problem.operations
        self.sizes = np.array([s.bytes for s in problem.storages], dtype=np.int64)
        self.given = [s.given and not s.tangent for s in problem.storages]
        there = {s for s, given in enumerate(self.given) if given}
        self.fusion = Fusion(problem.operations, self.sizes, there)
        self.order = [o.index for o in problem.operations if o.forward]
        self.tangents = [s.index for s in problem.storages if s.tangent]
        self._inputs = [tuple(s for s in o.inputs if not self.given[s]) for o in problem.operations]
        self._getters = [_getter(inputs) for inputs in self._inputs]
        self._outputs = [o.outputs for o in problem.operations]
        self._made_by = np.array([len(o.outputs) for o in problem.operations], dtype=np.int64)
        self._seconds = [o.seconds for o in problem.operations]
        self._workspace = np.array([o.workspace for o in problem.operations], dtype=np.int64)
        self._producer = [s.producer for s in problem.storages]
        self._held = frozenset(problem.forward_outputs)
        self._lent = self._among(self._held)
        self._tangent = self._among(self.tangents)
        self._output_bytes = int(self.sizes[self._lent].sum())
        self._tangent_bytes = int(self.sizes[self.tangents].sum())
        self._forward_made = {s for i in self.order for s in self.operations[i].outputs}
        backward = [o.index for o in problem.operations if o.backward]
        self.anchors = tightened(problem.operations, backward, self.sizes.tolist(), self._held | there)
        self._walked = [(a, self._getters[a], self._outputs[a]) for a in self.anchors]
        self._anchored = np.zeros(len(problem.operations), dtype=np.int64)
        self._anchored[self.anchors] = 1
        self._profile()

    def _among(self, storages: Collection[int]) -> NDArray[np.bool_]:
        """For each storage, whether it is one of `storages`."""
        found = np.zeros(len(self.sizes), dtype=bool)
        found[list(storages)] = True
        return found

    # ---- the forward --------------------------------------------------------------------------------------------

    def _profile(self) -> None:
        """Bytes live during each forward operation if nothing were kept, and where each storage is last used."""
        value: dict[int, int] = {}
        reads: list[tuple[int, ...]] = []
        birth: list[int] = []
        for step, index in enumerate(self.order):
            reads.append(tuple(value[s] for s in self._inputs[index]))
            for s in self.operations[index].outputs:
                value[s] = len(birth)
                birth.append(step)
        made, start = np.array(list(value), dtype=np.int64), np.array(birth, dtype=np.int64)
        stored = self.fusion.stored(Steps(self.order, made, start, reads), self._lent)
        n = len(self.order)
        change = np.zeros(n + 1, dtype=np.int64)
        np.add.at(change, start, stored.bytes)
        np.add.at(change, np.where(self._lent[made], n, stored.last + 1), -stored.bytes)
        self.forward_last = dict(zip(made.tolist(), stored.last.tolist(), strict=True))
        inside = np.array(stored.inside, dtype=bool)[start]
        #: Position in the forward behind which keeping a storage takes bytes; at its end for what takes none.
        self._kept_from = np.full(len(self.sizes), n, dtype=np.int64)
        self._kept_from[made] = np.where(self._lent[made], n, np.where(inside, start - 1, stored.last) + 1)
        self.forward_inside = set(made[inside].tolist())
        self._bare = np.cumsum(change)[:n] - stored.overwritten
        self._bare += self._workspace[self.order]

    def _forward(self, saved: Bytes) -> Bytes:
        n = len(self.order)
        change = np.zeros(n + 1, dtype=np.int64)
        np.add.at(change, self._kept_from[saved], self.sizes[saved])
        result: Bytes = self._bare + np.cumsum(change)[:n]
        return result

    # ---- the backward -------------------------------------------------------------------------------------------

    def run(self, state: State) -> Timeline:
        """The timeline of `state`."""
        walk = _Walk(self, state)
        walk.run()
        return self._measure(walk)

    def figures(self, state: State) -> Figures:
        """Those of its timeline, which is run once."""
        problem = self.problem
        key = state.key(problem.outputs_held, problem.tangents_held, problem.saved_held)
        found = self._tried.get(key)
        if found is None:
            found = self._figures_of(self.run(state))
            if len(self._tried) < MOST_TRIED:
                self._tried[key] = found
        return found

    def _figures_of(self, timeline: Timeline) -> Figures:
        problem = self.problem
        forward = int(timeline.forward.max(initial=problem.early)) - problem.early
        backward = int(timeline.backward.max(initial=problem.kept)) - problem.kept
        return Figures(len(timeline.steps), timeline.recomputed_s, forward, backward, timeline.boundary - problem.tail)

    def peak(self, figures: Figures) -> int:
        """The most bytes that are live at once."""
        problem = self.problem
        return max(figures.forward + problem.early, figures.held + problem.tail, figures.backward + problem.kept)

    def _measure(self, walk: _Walk) -> Timeline:
        values = walk.values()
        storage, birth = values.storage, values.birth
        read = (values.last[: walk.given] >= 0) & ~self._tangent[storage[: walk.given]]
        instances = np.flatnonzero(read)
        saved = storage[instances]
        n = len(walk.steps)
        stored = self.fusion.stored(values, self._lent)
        last, size = stored.last, stored.bytes
        if self.problem.tangents_held:
            last[self._tangent[storage]] = n - 1
        if self.problem.saved_held:
            last[instances] = n - 1
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
        forward = self._forward(saved) + problem.early
        kept = int(self.sizes[saved[~self._lent[saved]]].sum())
        boundary = kept + outputs + self._tangent_bytes + problem.tail
        peak = max(int(forward.max(initial=0)), boundary, int(backward.max(initial=0)))
        return Timeline(
            self._anchored, dict(zip(saved.tolist(), instances.tolist(), strict=True)), forward, backward, boundary,
            peak, walk.seconds, size, stored.inside, values, last,
        )  # fmt: skip


class _Walk:
    """One walk through the backward. Searches run thousands: what is done for each step is kept small.

    Attributes:
        given: number of instances that are there before the first step; they come first.
        seconds: of the steps that are no backward operation.
    """

    def __init__(self, schedule: Schedule, state: State) -> None:
        self.schedule, self.state = schedule, state
        self.steps: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.storage = sorted((state.kept | schedule._held) & schedule._forward_made) + schedule.tangents
        self.given = self.made = len(self.storage)
        self.at_hand = {s: i for i, s in enumerate(self.storage)}
        self.seconds = 0.0

    def run(self) -> None:
        """The backward's operations in order, each behind what it needs."""
        schedule, at_hand, steps, reads = self.schedule, self.at_hand, self.steps, self.reads
        evicted, held, made = self.state.evicted, schedule._held, self.given
        for position, (anchor, values, outputs) in enumerate(schedule._walked):
            if position in evicted:
                for s in evicted[position]:
                    if s not in held:
                        at_hand.pop(s, None)
            try:
                reads.append(values(at_hand))
            except KeyError:
                made = self._again(anchor, made)
                reads.append(values(at_hand))
            steps.append(anchor)
            for s in outputs:
                at_hand[s] = made
                made += 1
        self.made = made

    def _again(self, anchor: int, made: int) -> int:
        """Run what `anchor` reads and is not at hand, depth first, without Python's recursion. `made`: instances there
        are so far; returns how many there are then."""
        schedule, at_hand = self.schedule, self.at_hand
        stack = [anchor]
        while stack:
            operation = stack[-1]
            for s in schedule._inputs[operation]:
                if s not in at_hand:
                    stack.append(schedule._producer[s])
                    break
            else:
                stack.pop()
                if operation == anchor:
                    return made
                self.reads.append(schedule._getters[operation](at_hand))
                self.steps.append(operation)
                for s in schedule._outputs[operation]:
                    at_hand[s] = made
                    made += 1
                self.seconds += schedule._seconds[operation]
        raise AssertionError("the operation itself is on the stack until it can run")

    def values(self) -> Steps:
        """The steps, with the instances in the order in which they were made."""
        schedule = self.schedule
        outputs = chain.from_iterable([schedule._outputs[operation] for operation in self.steps])
        storage = np.fromiter(chain(self.storage, outputs), dtype=np.int64, count=self.made)
        birth = np.full(self.made, -1, dtype=np.int64)
        birth[self.given :] = np.repeat(np.arange(len(self.steps)), schedule._made_by[self.steps])
        return Steps(self.steps, storage, birth, self.reads)


def _getter(storages: tuple[int, ...]) -> Callable[[Mapping[int, int]], tuple[int, ...]]:
    """What gives the values of `storages` in order; `KeyError` where one is missing."""
    if len(storages) > 1:
        return itemgetter(*storages)
    return lambda values: tuple([values[s] for s in storages])
