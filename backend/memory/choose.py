"""Which plan a budget gets: plans of the search are carried out and replayed until one fits and uses what it may.

The search counts storages over the joint graph, which is exact where the graph is run as it stands; what Inductor
generates needs other bytes, by a part that changes along the way from the unconstrained peak to the floor. Each replay
is a point of that relation, and the next plan is asked for where a line between the nearest points says. How a plan is
carried out is the partitioner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from optpass.backend.memory.replay import StepReplay
from optpass.passes.memory.schedule import Timeline
from optpass.passes.memory.search import Search

Modules = tuple[fx.GraphModule, fx.GraphModule]

#: After so many replays, a plan that uses this part of the budget is not tried to be improved; each replay lowers both
#: graphs once under Inductor.
ENOUGH = (0.98, 0.97, 0.95, 0.95, 0.0)
#: Without a plan that fits, no more than so many are tried before those near the floor.
IN_VAIN = 4
#: The next plan is asked to use this part.
AIM = 0.99
#: What Inductor's generated code is taken to need of what the graphs as they stand do, until a replay says: at the
#: unconstrained peak, where it fuses much, and at the floor.
GENERATED_TOP, GENERATED_FLOOR = 0.75, 0.95
#: Points that are nearer to each other than this part of the floor give no slope.
NEARBY = 0.1
#: At the floor, plans whose peaks are so much larger by the search are carried out too: what Inductor makes of them
#: may need less.
NEAR_FLOOR = (1.0, 1.04)


@dataclass(frozen=True)
class Trial:
    """A plan, carried out.

    Attributes:
        modules: forward and backward.
        timeline: the plan.
        replay: of the modules.
        follow: bytes that others need on top of what it holds between forward and backward.
    """

    modules: Modules
    timeline: Timeline
    replay: StepReplay
    follow: int = 0

    @property
    def peak(self) -> int:
        """Replayed peak, bytes above the statics; that of others while this graph waits, too."""
        return max(self.replay.peak_bytes, self.replay.handed_bytes + self.follow if self.follow else 0)


@dataclass(frozen=True)
class _Point:
    counted: int  #: by the search
    replayed: int


class Chooser:
    """Finds the plan for one budget.

    Args:
        search: the plans.
        carry_out: makes a trial of a plan; its second argument asks for Inductor's leanest settings.
        room: bytes above the statics.
        held: bytes of the statics.
        generated: Inductor generates what is run; else the graphs are run as they stand.
        lean: whether leaner settings may make a difference.
    """

    def __init__(
        self, search: Search, carry_out: Callable[[Timeline, bool], Trial], room: int, held: int, *, generated: bool,
        lean: bool,
    ) -> None:  # fmt: skip
        self.search, self.room, self.held, self.lean = search, room, held, lean
        self._carry_out, self._generated = carry_out, generated
        self._trials: dict[tuple[int, float, bool], Trial] = {}
        self._points: list[_Point] = []

    def note(self, counted: int, replayed: int) -> None:
        """What a plan that was replayed elsewhere needs."""
        self._points.append(_Point(counted, replayed))

    def best(self) -> Trial | None:
        """The fastest plan found that fits; None if none of those that were tried does."""
        best: Trial | None = None
        for number, enough in enumerate(ENOUGH):
            timeline = self._next() if best is not None or number < IN_VAIN else None
            if timeline is None:
                break
            trial = self._tried(timeline)
            if trial.peak <= self.room and (best is None or _order(trial) < _order(best)):
                best = trial
            if best is not None and self.held + best.peak >= enough * (self.held + self.room):
                break
        return best

    def smallest(self) -> Trial:
        """Of the plans near the floor the first that fits, else the one of the smallest peak.

        Which are tried does not depend on the budget, so that the smallest peak is one that a budget can name.
        """
        found: list[Trial] = []
        for timeline, lean in self._near_the_floor():
            trial = self._tried(timeline, lean)
            found.append(trial)
            if trial.peak <= self.room:
                break
        return min(found, key=lambda trial: trial.peak)

    def _near_the_floor(self) -> Iterator[tuple[Timeline, bool]]:
        for lean in (False, True) if self.lean else (False,):
            for part in NEAR_FLOOR if self._generated else (1.0,):
                yield self._at_most(int(self.search.floor * part)), lean

    def _tried(self, timeline: Timeline, lean: bool = False) -> Trial:
        key = timeline.peak, timeline.recomputed_s, lean
        if key not in self._trials:
            self._trials[key] = trial = self._carry_out(timeline, lean)
            if not lean:
                self.note(timeline.peak, trial.peak)
        return self._trials[key]

    def _at_most(self, peak: int) -> Timeline:
        found = self.search.at_most(max(peak, self.search.floor))
        assert found is not None  # never below the floor
        return found[1]

    # ---- where to look next -------------------------------------------------------------------------------------

    def _next(self) -> Timeline | None:
        """A plan that was not tried, nearest to what the budget can hold; None if there is none worth trying."""
        over = [p for p in self._points if p.replayed > self.room]
        high = min(over, key=lambda p: p.counted, default=None)
        fits = [p for p in self._points if p.replayed <= self.room and (high is None or p.counted < high.counted)]
        low = max(fits, key=lambda p: p.counted, default=None)
        if high is not None and high.counted <= self.search.floor:
            return None
        least = self.search.floor if low is None else low.counted + 1
        most = self.search.unconstrained if high is None else high.counted - 1
        for wanted in (self._between(low, high), (least + most) // 2, most):
            timeline = self._at_most(min(max(wanted, least), most))
            if timeline.peak >= least and not any(p.counted == timeline.peak for p in self._points):
                return timeline
        return None

    def _between(self, low: _Point | None, high: _Point | None) -> int:
        """What the search has to count for the budget to be used, by the nearest points; guesses where there are
        none."""
        top, floor = self.search.unconstrained, self.search.floor
        at_top, at_floor = (GENERATED_TOP, GENERATED_FLOOR) if self._generated else (1.0, 1.0)
        aim = int((AIM if self._generated else 1.0) * (self.held + self.room)) - self.held
        start = _Point(floor, int(floor * at_floor))
        if high is None and low is not None:  # on from what fits
            run, rise = low.counted - start.counted, low.replayed - start.replayed
            slope = rise / run if run > NEARBY * floor and rise > 0 else low.replayed / max(low.counted, 1)
            return int(low.counted + (aim - low.replayed) / max(slope, 0.1))
        left = low or start
        right = high or _Point(top, int(top * at_top))
        if right.counted <= left.counted or right.replayed <= max(left.replayed, aim):
            return (left.counted + right.counted) // 2 if high is not None else right.counted
        part = (max(aim, left.replayed) - left.replayed) / (right.replayed - left.replayed)
        return int(left.counted + part * (right.counted - left.counted))


def _order(trial: Trial) -> tuple[float, int]:
    return trial.timeline.recomputed_s, trial.peak
