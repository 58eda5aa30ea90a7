"""The moves at a peak: which live tensors could be let go of there, what that frees, and what it costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from optpass.passes.memory.search.move import Candidate, Move
from optpass.passes.memory.search.schedule import Schedule, State, Timeline

#: A cone of recomputation larger than this is not looked through.
LARGEST_CONE = 400


class Finder:
    """The candidates of one timeline at its peak."""

    def __init__(
        self,
        schedule: Schedule,
        classes: Sequence[int],
        pinned: Collection[int],
        state: State,
        timeline: Timeline,
    ) -> None:
        self.schedule, self.classes, self.pinned = schedule, classes, pinned
        self.state, self.timeline = state, timeline
        self.operations = schedule.operations
        self.sizes = self.schedule.sizes
        self._fuses = any(timeline.inside)
        self._uses = _stored_uses(timeline) if self._fuses else timeline.uses
        self._instances: dict[int, list[int]] = {}
        for i, s in enumerate(timeline.storage):
            if timeline.uses[i]:
                self._instances.setdefault(s, []).append(i)
        made = [(birth, i) for i, birth in enumerate(timeline.birth) if birth >= 0]
        self._made_at = dict(made)
        self._anchor_of = {timeline.storage[i]: timeline.anchors[birth] for birth, i in made}

    def candidates(self) -> list[Candidate]:
        """Every single move at the peak."""
        timeline = self.timeline
        least = max(1, int(timeline.peak * 1e-4))
        backward = timeline.backward
        at = int(np.argmax(backward)) if len(backward) else -1
        if at < 0 or backward[at] < timeline.peak:
            return self._before(least)
        return self._during(at, least)

    def _before(self, least: int) -> list[Candidate]:
        """The peak is in the forward, or between forward and backward: what is kept over it."""
        timeline, schedule = self.timeline, self.schedule
        n = len(timeline.forward)
        at = int(np.argmax(timeline.forward)) if n else 0
        if timeline.boundary >= timeline.peak:
            at = n
        found = []
        for s, instance in timeline.saved.items():
            if self.sizes[s] < least or not self._may_drop(s) or schedule.forward_last.get(s, n) >= at:
                continue
            found.append(self._dropped(s, instance, -1))
        return [c for c in found if c is not None]

    def _may_drop(self, s: int) -> bool:
        return s not in self.schedule._held and s not in self.pinned

    def _during(self, at: int, least: int) -> list[Candidate]:
        """The peak is at step `at` of the backward."""
        timeline = self.timeline
        position = timeline.anchors[at]
        returned, held = set(self.schedule.problem.backward_outputs), self.schedule.problem.saved_held
        found = []
        for i, s in enumerate(timeline.storage):
            uses = self._uses[i]
            if timeline.bytes[i] < least or not uses or not timeline.birth[i] <= at <= timeline.last[i]:
                continue
            if not self._may_drop(s) or s in returned or self.operations[self.schedule._producer[s]].backward:
                continue
            k = bisect_left(uses, at)
            if held and timeline.birth[i] < 0:
                found.append(self._released(s, i, k, at))
                continue
            if k == len(uses) or uses[k] == at or timeline.birth[i] == at:
                continue
            before = uses[k - 1] if k else timeline.birth[i]
            if before < 0:
                found.append(self._dropped(s, i, at))
            elif timeline.anchors[uses[k]] > position:
                found.append(self._evicted(s, i, uses[k], before, position, at))
        return [c for c in found if c is not None]

    def _released(self, s: int, instance: int, k: int, at: int) -> Candidate | None:
        """What is held to the end of the backward is computed again instead where it is read, and let go of at the peak
        if it is read on both sides of it."""
        uses, position = self._uses[instance], self.timeline.anchors[at]
        found = None if k < len(uses) and uses[k] == at else self._dropped(s, instance, -1)
        if found is None or k in (0, len(uses)):
            return found
        move, lean = (replace(one, evict=(*one.evict, (s, position))) for one in (found.move, found.lean))
        return replace(found, move=move, lean=lean)

    # ---- one move -----------------------------------------------------------------------------------------------

    def _dropped(self, s: int, instance: int, at: int) -> Candidate | None:
        through = self._through(instance, at) if at >= 0 else set()
        if through is None:
            return None
        step = next(u for u in self._uses[instance] if u > at)
        cone = self._cone(s, step, at, {s, *through})
        if cone is None:
            return None
        seconds, members = cone
        drop = (s, *(m for m in sorted(members) if m != s and m in self.state.kept and m not in self.timeline.saved))
        kind = (0, self.classes[s])
        order = self.schedule._producer[s]
        evict = self._at(self.timeline.anchors[step], through)
        lean = Move(drop=drop, evict=evict + self._after(step, members - {s}))
        return Candidate(Move(drop=drop, evict=evict), lean, int(self.sizes[s]), seconds, kind, order)

    def _evicted(self, s: int, instance: int, step: int, before: int, position: int, at: int) -> Candidate | None:
        through = self._through(instance, at)
        cone = None if through is None else self._cone(s, step, at, {s, *through})
        if cone is None or through is None:
            return None
        seconds, members = cone
        # What was read or made for this very operation is let go of behind it.
        here = {self.timeline.anchors[before], *(self._anchor_of[m] for m in through)}
        where = position + 1 if position in here else position
        evict = self._at(where, {s, *through})
        kind = (1, self.classes[s], where)
        lean = Move(evict=evict + self._after(step, members - {s}))
        return Candidate(Move(evict=evict), lean, int(self.sizes[s]), seconds, kind, self.schedule._producer[s])

    def _through(self, instance: int, at: int) -> set[int] | None:
        """Storages of what is computed inside its readers behind step `at` from `instance`, and was made before: to let
        go of the one is to let go of the others. None where one of them cannot be made again."""
        timeline, found, stack = self.timeline, set[int](), [instance]
        if not self._fuses:
            return found
        while stack:
            for step in timeline.uses[stack.pop()]:
                if step > at or not timeline.inside[step]:
                    continue
                operation = self.operations[timeline.steps[step]]
                made = self._made_at[step]
                if timeline.last[made] <= at:
                    continue
                if operation.backward or operation.kept_why:
                    return None
                found.add(timeline.storage[made])
                stack.append(made)
        return found

    @staticmethod
    def _at(position: int, members: Collection[int]) -> tuple[tuple[int, int], ...]:
        return tuple((m, position) for m in sorted(members))

    def _after(self, step: int, members: set[int]) -> tuple[tuple[int, int], ...]:
        """Evictions of `members` behind the operation that `step` belongs to."""
        return self._at(self.timeline.anchors[step] + 1, members)

    def _cone(self, s: int, step: int, at: int, gone: Collection[int]) -> tuple[float, set[int]] | None:
        """Seconds to make `s` again at `step`, and the storages computed on the way; None if that cannot be. What is
        in `gone` is not at hand, and is made again too."""
        schedule = self.schedule
        seconds = sum(self.operations[schedule._producer[g]].seconds for g in sorted(gone) if g != s)
        members, stack = {s}, [s]
        while stack:
            current = stack.pop()
            operation = self.operations[schedule._producer[current]]
            if operation.kept_why or operation.backward or len(members) > LARGEST_CONE:
                return None
            seconds += operation.seconds
            for u in schedule._inputs[operation.index]:
                if u not in members and (u in gone or not self._at_hand(u, step, at)):
                    members.add(u)
                    stack.append(u)
        return seconds, members

    def _at_hand(self, u: int, step: int, at: int) -> bool:
        """Whether `u` is live at `step` anyway, or can be held until then without being live at the peak; or nothing
        but to keep it is possible."""
        if u in self.schedule._held or (u in self.pinned and u in self.state.kept):
            return True
        timeline = self.timeline
        for i in self._instances.get(u, ()):
            if timeline.birth[i] <= step and (timeline.last[i] >= step or timeline.last[i] > at >= 0):
                return True
        return False


def _stored_uses(timeline: Timeline) -> list[list[int]]:
    """For each instance, the steps inside whose kernels it is read, ascending."""
    behind: dict[int, list[int]] = {}
    found: list[list[int]] = [[] for _ in timeline.storage]
    for i in range(len(found) - 1, -1, -1):
        birth = timeline.birth[i]
        steps: set[int] = set()
        for step in timeline.uses[i]:
            steps.update(behind[step] if timeline.inside[step] else (step,))
        found[i] = sorted(steps)
        if birth >= 0 and timeline.inside[birth]:
            behind[birth] = found[i]
    return found
