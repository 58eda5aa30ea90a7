"""The largest micro-batch whose step fits a budget (`--batch auto`).

The smallest peak of a step is nearly a straight line over the batch, so that a secant finds the largest batch in a few
traces; every answer is a traced and searched one.
"""

from __future__ import annotations

from optpass.errors import ConfigError
from optpass.naming import given
from optpass.planning.plan import Solved, no_plan, solve
from optpass.planning.request import Request

#: Traces before giving up on the last few samples; a straight line needs three or four.
_MOST_TRACES = 16
#: Largest batch that is looked at.
_LARGEST = 1 << 20


def largest_batch(request: Request, budget: int) -> tuple[Solved, list[tuple[int, int]]]:
    """The step at the largest micro-batch whose smallest peak is within `budget` bytes, and what was tried.

    The request's headroom is left free where more than one sample fits beside it.

    Returns:
        The step, and (micro-batch, its smallest peak in bytes) of every trace, by micro-batch.

    Raises:
        BudgetInfeasibleError: not even one sample fits.
        ConfigError: the target's micro-batch cannot be set.
    """
    found: dict[int, Solved] = {}

    def floor(batch: int) -> int:
        if batch not in found:
            found[batch] = solve(request, batch)
            planner = found[batch].planner
            floors[batch], lines[batch] = planner.floor, planner.graph_floor
            _keep_only(found, batch, room)
        return floors[batch]

    floors: dict[int, int] = {}
    lines: dict[int, int] = {}  # without the optimizer's step, which does not grow with the batch
    room = int(budget * (1 - request.headroom))
    if floor(1) > budget:
        raise no_plan(request, found[1], budget)
    if found[1].captured.batch is None:
        raise ConfigError(f"{given('batch', 'auto')}: this target does not say which of its sizes is the micro-batch")
    if floor(1) > room:
        return found[1], sorted(floors.items())
    low, high = 1, _LARGEST + 1  # the largest that fits, the smallest that does not
    guess = 2
    for _ in range(_MOST_TRACES):
        if high - low <= 1:
            break
        guess = min(max(guess, low + 1), high - 1)
        if floor(guess) <= room:
            low = guess
        else:
            high = guess
        guess = _secant(lines, room, low, high)
    return found[low], sorted(floors.items())


def _secant(lines: dict[int, int], budget: int, low: int, high: int) -> int:
    """Where the line through the two nearest tries meets the budget, or half way once both ends are near."""
    if high <= _LARGEST:
        a, b = low, high
        if high - low <= 2:
            return low + 1
    else:
        a, b = sorted(lines)[-2:] if len(lines) > 1 else (0, low)
    slope = (lines[b] - lines.get(a, 0)) / (b - a)
    if slope <= 0:
        return min(2 * low, _LARGEST)
    return int(a + (budget - lines.get(a, 0)) / slope)


def _keep_only(found: dict[int, Solved], latest: int, budget: int) -> None:
    """Let go of graphs that can be no answer: all but the latest and the largest that fits."""
    fits = [b for b in found if found[b].planner.floor <= budget]
    kept = {latest, max(fits, default=latest)}
    for batch in list(found):
        if batch not in kept:
            del found[batch]
