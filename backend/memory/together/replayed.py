"""Plans chosen for the graphs of a step, replayed as Inductor would run them, before any of them is compiled.

A search counts of what Inductor generates a few percent more or less than it needs. Plans that were chosen by counts
alone would not fit, or would leave as much of the budget, once they were compiled, and each graph would be compiled
again and again for the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from optpass.backend.compat.memory import Work, keep
from optpass.backend.memory.plans.bounds import Choice
from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.together.figures import replayed_choice

Chosen = tuple[list[Choice], int]

#: Times that plans are chosen again, after those chosen before were replayed.
ROUNDS = 4


def chosen_by_replays(
    leaves: Sequence[Leaf],
    counted: Sequence[Sequence[Choice]],
    choose: Callable[[Sequence[Sequence[Choice]]], Chosen],
    enough: Callable[[Sequence[Choice]], bool],
) -> tuple[list[Choice], int, list[list[Choice]]]:
    """A plan for each graph, by how many bytes they are over, and what was chosen from in the end.

    Args:
        leaves: the graphs.
        counted: plans of each, as the search counts them.
        choose: a plan for each graph, and by how many bytes they are over.
        enough: whether plans fit, and use the budget.
    """
    plans = [_Plans(leaf, found) for leaf, found in zip(leaves, counted, strict=True)]
    if len(plans) == 1:  # its compile replays as many as it needs
        return *choose(counted), [list(found) for found in counted]
    chosen, over, choices = _chosen(plans, choose, enough)
    keep(work for found, plan in zip(plans, chosen, strict=True) for work in found.works(plan))
    return chosen, over, choices


def _chosen(
    plans: Sequence[_Plans],
    choose: Callable[[Sequence[Sequence[Choice]]], Chosen],
    enough: Callable[[Sequence[Choice]], bool],
) -> tuple[list[Choice], int, list[list[Choice]]]:
    if any(found.unknown for found in plans):  # what is off of one is off of the others, too
        chosen, _ = choose([found.now() for found in plans])
        first = next(i for i, found in enumerate(plans) if found.unknown)
        plans[first].replay(chosen[first])
        for found in plans:
            found.learn(plans[first])
    for _ in range(ROUNDS):
        chosen, over = choose(now := [found.now() for found in plans])
        news = [found.replay(plan) for found, plan in zip(plans, chosen, strict=True)]
        if not any(news):
            return chosen, over, now
        exact = [found.exact(plan) for found, plan in zip(plans, chosen, strict=True)]
        if enough(exact):
            return exact, 0, [found.now() for found in plans]
    ends = [(*choose(some), some) for some in ([one.only_exact() for one in plans], [one.now() for one in plans])]
    return next((end for end in ends if end[1] <= 0), min(ends, key=lambda end: end[1]))


class _Plans:
    """Those of one graph; what is not replayed is taken to be off as the nearest one that is.

    Attributes:
        unknown: nothing is known of how far counts are off.
    """

    def __init__(self, leaf: Leaf, counted: Sequence[Choice]) -> None:
        self._leaf, self._counted = leaf, counted
        self._exact: dict[int, Choice] = {}  #: by place
        self._works: dict[int, list[Work]] = {}
        self._known = leaf.partitioner.executor == "inductor"  #: may be replayed
        self.unknown = leaf.partitioner.as_it_stands
        self._off = 1.0, 1.0  #: peak and peak of the forward, in parts of what is counted, as another graph's are

    def learn(self, other: _Plans) -> None:
        """Be off as another one is, where nothing else is known."""
        if not self.unknown or not other._exact:
            return
        place, found = next(iter(other._exact.items()))
        counted = other._counted[place]
        self._off = found.peak / max(counted.peak, 1), found.forward / max(counted.forward, 1)

    def now(self) -> list[Choice]:
        return [self._exact.get(place) or self._as_nearest(one) for place, one in enumerate(self._counted)]

    def only_exact(self) -> list[Choice]:
        return list(self._exact.values()) or list(self._counted)

    def exact(self, plan: Choice) -> Choice:
        return next((one for one in self._exact.values() if one.state == plan.state), plan)

    def replay(self, plan: Choice) -> bool:
        """Whether that is news."""
        place = next((i for i, one in enumerate(self._counted) if one.state == plan.state), None)
        if plan.state is None or place is None or place in self._exact or not self._known:
            return False
        found = replayed_choice(self._leaf, self._counted[place])
        self._known = found is not None
        if found is not None:
            self._exact[place], replayed = found
            self._works[place] = [lowered.work for lowered in replayed.lowered if lowered.work is not None]
        return self._known

    def works(self, plan: Choice) -> list[Work]:
        """What was lowered of it, to be compiled next."""
        return next((self._works[i] for i, one in self._exact.items() if one.state == plan.state), [])

    def _as_nearest(self, one: Choice) -> Choice:
        if not self._exact:
            peak, forward = self._off
            return replace(one, peak=int(peak * one.peak), forward=int(forward * one.forward))
        place = min(self._exact, key=lambda i: abs(self._counted[i].peak - one.peak))
        counted, found = self._counted[place], self._exact[place]
        peak, forward = found.peak - counted.peak, found.forward - counted.forward
        return replace(one, peak=one.peak + peak, forward=one.forward + forward)
