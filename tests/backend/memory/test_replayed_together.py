"""Plans chosen for several graphs, replayed before any is compiled; one plan for graphs that are equal."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from optpass.backend.compat import memory_known
from optpass.backend.compat.memory import Work
from optpass.backend.memory.plans.alike import made_alike
from optpass.backend.memory.plans.allot import select
from optpass.backend.memory.plans.bounds import Bound, Choice, excess, total
from optpass.backend.memory.together import replayed


def choice(peak: int, held: int, seconds: float, place: int) -> Choice:
    return Choice(peak, held, seconds, forward=peak // 2, state=((place,), ()))


#: Two graphs that wait for each other, as a search counts them.
COUNTED = [choice(100 * i, 80 * i, 10.0 - i, i) for i in range(1, 11)]
BOUNDS = [Bound(0, (), 0, 1000), Bound(1, ((0, 1),), 0, 1000)]


@pytest.mark.parametrize("part", [0.8, 1.0, 1.1])
@pytest.mark.parametrize("stands", [True, False])
def test_plans_fit_as_they_are_replayed(monkeypatch: pytest.MonkeyPatch, part: float, stands: bool) -> None:
    """The peak of what is generated is another part of what was counted in each plan."""
    asked: list[int] = []
    kept: list[Any] = []

    def replay(leaf: Any, counted: Choice) -> Any:
        place = counted.state[0][0]
        asked.append(place)
        exact = Choice(
            int(counted.peak * (part + 0.005 * (place % 3))), counted.held, counted.seconds, state=counted.state
        )
        return exact, SimpleNamespace(lowered=[SimpleNamespace(work=(leaf.name, place))])

    monkeypatch.setattr(replayed, "replayed_choice", replay)
    monkeypatch.setattr(replayed, "keep", kept.extend)
    leaves = [
        SimpleNamespace(name=name, partitioner=SimpleNamespace(executor="inductor", as_it_stands=stands))
        for name in ("one", "two")
    ]

    def choose(choices: Sequence[Sequence[Choice]]) -> tuple[list[Choice], int]:
        chosen = select(choices, [1, 1], BOUNDS)
        return chosen, excess(chosen, BOUNDS)

    def enough(chosen: Sequence[Choice]) -> bool:
        return excess(chosen, BOUNDS) <= 0 and max(total(chosen, bound) for bound in BOUNDS) >= 950

    chosen, over, choices = replayed.chosen_by_replays(leaves, [COUNTED, COUNTED], choose, enough)  # type: ignore[arg-type]
    assert over <= 0
    assert excess(chosen, BOUNDS) <= 0
    for plan in chosen:
        assert plan.peak == int(100 * plan.state[0][0] * (part + 0.005 * (plan.state[0][0] % 3)))  # type: ignore[index]
    assert max(total(chosen, bound) for bound in BOUNDS) >= 800
    assert len(asked) <= 2 * replayed.ROUNDS + 1
    assert all(plan in found for plan, found in zip(chosen, choices, strict=True))
    assert kept == [(leaf.name, plan.state[0][0]) for leaf, plan in zip(leaves, chosen, strict=True)]  # type: ignore[index]


def test_what_is_run_as_it_was_counted_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "replayed_choice", None)
    leaf: Any = SimpleNamespace(partitioner=SimpleNamespace(executor="graph", as_it_stands=False))
    chosen, over, _ = replayed.chosen_by_replays(
        [leaf], [COUNTED], lambda found: ([found[0][3]], -5), lambda plans: True
    )
    assert (chosen, over) == ([COUNTED[3]], -5)


def test_what_cannot_be_replayed_is_taken_as_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "replayed_choice", lambda leaf, counted: None)
    leaf: Any = SimpleNamespace(partitioner=SimpleNamespace(executor="inductor", as_it_stands=True))
    chosen, over, _ = replayed.chosen_by_replays(
        [leaf], [COUNTED], lambda found: ([found[0][3]], -5), lambda plans: True
    )
    assert (chosen, over) == ([COUNTED[3]], -5)


def test_equal_graphs_get_one_plan_where_that_costs_nothing() -> None:
    choices = [COUNTED, COUNTED]
    chosen = [COUNTED[2], COUNTED[4]]
    loose = [Bound(0, ((1, 1),), 0, 2000)]
    assert made_alike(chosen, choices, [[0, 1]], [1, 1], loose, 10.0) == [COUNTED[9], COUNTED[9]]
    tight = [Bound(0, ((1, 1),), 0, total(chosen, loose[0]))]
    alike = made_alike(chosen, choices, [[0, 1]], [1, 1], tight, 1000.0)
    assert alike[0] == alike[1]
    assert excess(alike, tight) <= 0
    assert made_alike(chosen, choices, [[0, 1]], [1, 1], [Bound(0, ((1, 1),), 0, 10)], 10.0)[0].state is not None
    assert made_alike(chosen, choices, [], [1, 1], loose, 10.0) == chosen


def test_equal_graphs_keep_their_plans_where_one_would_take_longer() -> None:
    slow, fast = choice(100, 80, 9.0, 1), choice(1000, 800, 0.0, 2)
    bounds = [Bound(0, ((1, 1),), 0, 1100)]
    chosen = [fast, slow]
    assert made_alike(chosen, [[slow, fast], [slow, fast]], [[0, 1]], [1, 1], bounds, 10.0) == chosen


def test_a_lowering_is_kept_for_one_compile() -> None:
    work, other = Work((), graph=object(), digest="a"), Work((), graph=object(), digest="b")
    memory_known.keep([work, Work((), digest="c")])
    assert memory_known.kept("c") is None
    assert memory_known.kept(None) is None
    assert memory_known.kept("a") is work
    assert memory_known.kept("a") is None
    memory_known.keep([work])
    memory_known.keep([other])
    assert memory_known.kept("a") is None
    memory_known.forget()
    assert memory_known.kept("b") is None
