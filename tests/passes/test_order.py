"""Order of passes from their declarations."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import fx

from optpass.errors import ConfigError
from optpass.options import Options
from optpass.passes.contract import Pass, PassContext, PassResult, Stage
from optpass.passes.order import missing_requirement, ordered


def make(name: str, requires: tuple[str, ...] = (), runs_after: tuple[str, ...] = ()) -> Pass:
    class Made(Pass):
        stage = Stage.DYNAMO

        @classmethod
        def from_options(cls, options: Options) -> Pass:
            return cls()

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
            return PassResult()

    Made.name, Made.summary, Made.requires, Made.runs_after = name, name, requires, runs_after
    return Made()


def names(passes: list[Any]) -> list[str]:
    return [p.name for p in passes]


def test_ties_keep_the_given_order() -> None:
    assert names(ordered([make("c"), make("a"), make("b")])) == ["c", "a", "b"]


def test_requires_and_runs_after() -> None:
    given = [make("a", requires=("c",)), make("b", runs_after=("a", "not there")), make("c")]
    assert names(ordered(given)) == ["c", "a", "b"]


def test_a_freed_pass_comes_before_later_ones() -> None:
    given = [make("a", runs_after=("b",)), make("b"), make("c")]
    assert names(ordered(given)) == ["b", "a", "c"]


def test_every_random_order_holds_its_declarations() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        total = [f"p{i}" for i in range(8)]
        given = [make(n, runs_after=tuple(rng.sample(total[:i], rng.randint(0, i)))) for i, n in enumerate(total)]
        rng.shuffle(given)
        result = names(ordered(given))
        assert sorted(result) == total
        for item in given:
            assert all(result.index(before) < result.index(item.name) for before in item.runs_after)
        assert result == names(ordered(given))


@pytest.mark.parametrize(
    "given",
    [
        [make("a", requires=("b",)), make("b", runs_after=("a",))],
        [make("a", runs_after=("a",)), make("b")],
    ],
)
def test_cycles_are_named(given: list[Pass]) -> None:
    with pytest.raises(ConfigError, match=r"wait for each other: .*a.* -> "):
        ordered(given)


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="two passes are called 'a'"):
        ordered([make("a"), make("b"), make("a")])


def test_missing_requirement() -> None:
    item = make("a", requires=("b", "c"))
    assert missing_requirement(item, {"b", "c", "x"}) is None
    assert missing_requirement(item, {"b"}) == "c"
