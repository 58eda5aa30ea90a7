"""Which plan a budget gets: plans of the search are carried out and replayed until one fits and uses what it may.

The search counts storages over the joint graph, which is exact where the graph is run as it stands; of what Inductor
generates it is a model, which is off by what kernels are merged and ordered otherwise. Each replay says by how much
near one plan, and the next plan is asked for accordingly. How a plan is carried out is the partitioner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from optpass.backend.memory.replay.replay import StepReplay
from optpass.passes.memory.search.schedule import Timeline
from optpass.passes.memory.search.search import Search

Modules = tuple[fx.GraphModule, fx.GraphModule]

#: After so many replays, a plan that uses this part of the budget is not tried to be improved; each replay lowers both
#: graphs once under Inductor.
ENOUGH = (0.98, 0.97, 0.95, 0.95, 0.0)
#: A budget of which less than this part is used by a plan that recomputes lies between two plans: the report says so.
USED = 0.95
#: So many plans that mislead do not count as tried.
MISLEADING = 2
#: Without a plan that fits, no more than so many are tried before those near the floor.
IN_VAIN = 4
#: The next plan is asked to use this part.
AIM = 0.99
#: Bytes that a replay needs less for each byte that is counted less, at most: what is nearer than that to a plan that
#: does not fit is not tried.
STEEP = 4.0
#: And bytes that it needs more for each byte that is counted more, at least.
FLAT = 0.7
#: At the floor, plans whose peaks are so much larger by the search are carried out too: what Inductor makes of them
#: may need less.
NEAR_FLOOR = (1.0, 1.04)
#: Where a plan near the floor is replayed with so many times what was counted, the search is wrong about this step: the
#: floor may be anywhere, and is looked for at up to so many places below the peaks that were found, until one is lower
#: and the next is not.
WRONG, PLACES = 1.1, 4


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
        settings: whether plans are carried out under leaner settings: False, True, or first without them and then with
            them, where nothing else fits.
        beneath: plans of the smallest peaks inside of the graph, whatever is between its halves.
    """

    def __init__(
        self, search: Search, carry_out: Callable[[Timeline, bool], Trial], room: int, held: int, *, generated: bool,
        settings: Sequence[bool] = (False,), beneath: Callable[[], Iterator[Timeline]] = lambda: iter(()),
    ) -> None:  # fmt: skip
        self.search, self.room, self.held, self._settings = search, room, held, settings
        self._carry_out, self._generated, self._beneath = carry_out, generated, beneath
        self._lean = settings[0]
        self._trials: dict[tuple[int, float, bool], Trial] = {}
        self._replayed: dict[bool, list[_Point]] = {lean: [] for lean in settings}

    @property
    def _points(self) -> list[_Point]:
        """What is known under the present settings."""
        return self._replayed[self._lean]

    @property
    def _least(self) -> int:
        """The smallest peak of a plan of the search."""
        self.search.refilled()
        return self.search.least

    def note(self, counted: int, replayed: int) -> None:
        """What a plan that was replayed elsewhere needs, under the first settings."""
        self._replayed[self._settings[0]].append(_Point(counted, replayed))

    def best(self) -> Trial | None:
        """The fastest plan found that fits; None if none of those that were tried does."""
        for lean in self._settings:
            self._lean = lean
            found = self._best()
            if found is not None:
                return found
        return None

    def _best(self) -> Trial | None:
        best: Trial | None = None
        number = 0
        while (counted := max(0, number - min(len(self._misleading()), MISLEADING))) < len(ENOUGH):
            timeline = self._next() if best is not None or number < IN_VAIN else None
            number, enough = number + 1, ENOUGH[counted]
            if timeline is None:
                break
            trial = self._tried(timeline)
            if trial.peak <= self.room and (best is None or _order(trial) < _order(best)):
                best = trial
            if best is not None and self.held + best.peak >= enough * (self.held + self.room):
                break
        return best

    def better(self, trial: Trial) -> Trial:
        """`trial`, which fits, or a faster plan that does."""
        if self.held + trial.peak >= ENOUGH[0] * (self.held + self.room):
            return trial
        self.note(trial.timeline.peak, trial.peak)
        return min((one for one in (trial, self.best()) if one is not None), key=_order)

    def unused(self, found: Trial) -> int | None:
        """Where `found` recomputes though it leaves much of the budget: the peak of the smallest plan known that
        recomputes less, bytes above the statics. None where it uses the budget, or no such plan is known.

        Of what Inductor generates, plans that were replayed are known; where none of them is too large, those of the
        search are taken to need as much more than was counted as `found`."""
        if self.held + found.peak >= USED * (self.held + self.room):
            return None
        seconds = found.timeline.recomputed_s
        peaks = [t.peak for t in self._trials.values() if t.timeline.recomputed_s < seconds and t.peak > self.room]
        if not peaks or not self._generated:
            more = found.peak - found.timeline.peak if self._generated else 0
            peaks = [peak + more for peak, _ in self.search.frontier() if peak > found.timeline.peak]
        return min((peak for peak in peaks if peak > self.room), default=None)

    def smallest(self) -> Trial:
        """Of the plans near the floor the first that fits, else the one of the smallest peak.

        Which are tried does not depend on the budget, so that the smallest peak is one that a budget can name.
        """
        found: list[Trial] = []
        self._lean = self._settings[-1]
        for timeline in self._near_the_floor(found):
            trial = self._tried(timeline)
            found.append(trial)
            if trial.peak <= self.room:
                break
        return min(found, key=lambda trial: trial.peak)

    def _near_the_floor(self, found: Sequence[Trial]) -> Iterator[Timeline]:
        """Plans to try; `found` grows by each before the next is asked for."""
        if self._least < self.search.floor:
            yield self._at_most(self._least)
        for part in NEAR_FLOOR if self._generated else (1.0,):
            yield self._at_most(int(self.search.floor * part))
        if self._generated and all(_bound_between(trial) for trial in found):
            # The search goes no further than to what is between the halves; what is generated needs more inside.
            yield from self._beneath()
        if all(trial.replay.peak_bytes > WRONG * trial.timeline.peak for trial in found):
            least, peaks = self.search.floor, [trial.peak for trial in found]
            first, most = min(peaks), min(self.search.unconstrained, *peaks)
            for place in range(1, PLACES + 1):
                yield self._at_most(least + (most - least) * place // PLACES)
                if found[-1].peak >= min(peaks) < first:
                    return
                peaks.append(found[-1].peak)

    def _tried(self, timeline: Timeline) -> Trial:
        key = timeline.peak, timeline.recomputed_s, self._lean
        if key not in self._trials:
            self._trials[key] = trial = self._carry_out(timeline, self._lean)
            self._points.append(_Point(timeline.peak, trial.peak))
        return self._trials[key]

    def _at_most(self, peak: int) -> Timeline:
        found = self.search.at_most(max(peak, self._least))
        assert found is not None  # never below the least
        return found[1]

    # ---- where to look next -------------------------------------------------------------------------------------

    def _next(self) -> Timeline | None:
        """A plan that was not tried, nearest to what the budget can hold; None if there is none worth trying."""
        misleading = self._misleading()
        over = [p for p in self._points if p.replayed > self.room and p not in misleading]
        high = min(over, key=lambda p: p.counted, default=None)
        fits = [p for p in self._points if p.replayed <= self.room and (high is None or p.counted < high.counted)]
        low = max(fits, key=lambda p: p.counted, default=None)
        if high is not None and high.counted <= self._least:
            return None
        least = self._least if low is None else low.counted + 1
        most = self.search.unconstrained if high is None else high.counted - 1
        aim = int((AIM if self._generated else 1.0) * (self.held + self.room)) - self.held
        targets = (self._between(low, high, aim), self._between(low, high, self.room), (least + most) // 2, most)
        for wanted in targets:
            timeline = self._at_most(min(max(wanted, least), most))
            while timeline.peak > least and any(p.counted == timeline.peak for p in misleading):
                timeline = self._at_most(timeline.peak - 1)
            tried = timeline.peak < least or any(p.counted == timeline.peak for p in self._points)
            if not tried and self._may_fit(timeline.peak, low, high):
                return timeline
        return None

    def _misleading(self) -> list[_Point]:
        """Plans that are too large though one of which more was counted needs less: what is generated for them, such as
        a merged kernel, says nothing of those between."""
        return [
            p
            for p in self._points
            if p.replayed > self.room and any(q.counted > p.counted and q.replayed < p.replayed for q in self._points)
        ]

    def _may_fit(self, counted: int, low: _Point | None, high: _Point | None) -> bool:
        """Whether a plan is far enough from those that are known to be too large, or near enough to one that fits."""
        if high is not None:
            return high.replayed - (high.counted - counted) * STEEP <= self.room
        return low is None or (counted - low.counted) * FLAT <= self.room - low.replayed

    def _between(self, low: _Point | None, high: _Point | None, aim: int) -> int:
        """What the search has to count for `aim` to be used: what the nearest replay needed more or less than was
        counted, the next plan is taken to need too; between two, what a line between them says."""
        if low is None or high is None:
            nearest = low or high
            if nearest is None:
                return aim
            wanted = nearest.counted + (aim - nearest.replayed)
            near = wanted <= NEAR_FLOOR[-1] * self.search.floor
            return self.search.floor if high is not None and near and self._generated else wanted
        if high.replayed <= max(low.replayed, aim):
            return (low.counted + high.counted) // 2
        part = (max(aim, low.replayed) - low.replayed) / (high.replayed - low.replayed)
        return int(low.counted + part * (high.counted - low.counted))


def _bound_between(trial: Trial) -> bool:
    """Whether the search counts most between the halves, and the replay elsewhere."""
    return (
        trial.timeline.boundary >= trial.timeline.peak / NEAR_FLOOR[-1]
        and trial.replay.peak_bytes > trial.timeline.boundary
    )


def _order(trial: Trial) -> tuple[float, int]:
    return trial.timeline.recomputed_s, trial.peak
