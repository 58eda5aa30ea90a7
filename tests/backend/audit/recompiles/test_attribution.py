"""What a record says beyond its cause: the closest entry, the function, values in order, guards, seconds, fixes."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optpass.backend.audit.buckets import buckets
from optpass.backend.audit.recompiles import RecompileCollector
from optpass.reporting.audit.model import Recompile

X = torch.randn(4)
Records = Callable[[], list[Recompile]]


def test_the_closest_entry_is_blamed_not_the_newest(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x, n: x * n, dynamic=False)
    run(X, 2)
    with torch.no_grad():
        run(torch.randn(6), 3)  # three things differ from the first entry
    run(X.clone().requires_grad_(), 2)  # one from the first, four from the second
    last = recompiles()[-1]
    assert (last.cause, last.source, last.before, last.after) == ("requires_grad", "x.requires_grad", "False", "True")
    assert last.guards == ["x.requires_grad == False, now True"]


def test_all_failing_guards_of_the_closest_entry(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x, y, n: x.sum() + y.sum() * n, dynamic=False)
    run(X, X.clone(), 2)
    run(torch.randn(5), torch.randn(5), 3)
    (record,) = recompiles()
    assert set(record.guards) == {"x.size(0) == 4, now 5", "y.size(0) == 4, now 5", "n == 2, now 3"}


def test_guards_that_fail_only_later_are_told_too(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda xs, scale: xs[0] * scale, dynamic=False)
    run([X], 2)
    run([X, X], 2)
    run([X, X, X], 4)
    run([X, X, X, X], 4)
    (record,) = recompiles()
    assert (record.cause, record.source, record.count) == ("list length", "len(xs)", 3)
    assert record.guards == ["len(xs) == 1, now 2", "scale == 2, now 4"]


def test_what_died_behind_a_break_is_named_by_its_line(compiled: Any, recompiles: Records) -> None:
    kept: list[float] = []

    def f(x: Any) -> Any:
        y = x * 2
        kept.append(y.sum().item())
        return y + 1

    run = compiled(f)
    for _ in range(3):
        run(X)
    line = f.__code__.co_firstlineno + 2
    dead = [record for record in recompiles() if record.cause == "weak reference"]
    assert dead or torch.__version__ < "2.13"  # 2.11 has no such record here
    assert all(f" of line {line}>" in record.source and f"line {line}" in record.fix.text for record in dead)
    assert all("intermediate" not in record.source for record in recompiles())


def test_values_are_listed_in_order_and_lengths_are_bucketed(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x: x * 2, dynamic=False)
    for length in (17, 33, 100, 31):
        run(torch.randn(length))
    (record,) = recompiles()
    assert record.values == ["17", "33", "100", "31"]
    assert (record.count, record.before, record.after) == (3, "17", "33")
    assert "dynamic=False" in record.fix.text
    assert "mark_dynamic(x, 0)" in record.fix.text
    assert "40, 104" in record.fix.text


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([17, 33, 100, 31], [40, 104]), ([3, 5], [5]), ([1, 2, 3], [1, 3]), ([], []), ([64, 64], [64]),
     (range(1, 101), [25, 50, 75, 100])],
)  # fmt: skip
def test_buckets_pad_least(lengths: Any, expected: list[int]) -> None:
    found = buckets(list(lengths))
    assert found == expected


def test_buckets_are_optimal() -> None:
    random.seed(torch.initial_seed())

    def padding(sizes: list[int], bounds: Any) -> int:
        return sum(min(bound for bound in bounds if bound >= size) - size for size in sizes)

    for _ in range(20):
        sizes = [1, *random.sample(range(2, 60), 7)]
        found = buckets(sizes)
        others = (b for b in itertools.combinations(sorted(sizes), len(found)) if b[-1] == max(sizes))
        assert padding(sizes, found) == min(padding(sizes, bounds) for bounds in others)


def test_a_resumed_frame_is_its_functions(compiled: Any, recompiles: Records) -> None:
    def broken(x: Any, n: Any) -> Any:
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        return x * n

    run = compiled(broken, dynamic=False)
    run(X, 2)
    run(X, 3)
    assert {(r.function, r.line, r.cause, r.source) for r in recompiles()} == {
        (broken.__code__.co_qualname, broken.__code__.co_firstlineno, "int", "n")
    }


def test_a_called_function_behind_a_break_is_itself(compiled: Any, recompiles: Records) -> None:
    def helper(x: Any, n: Any) -> Any:
        return x * n

    def outer(x: Any, n: Any) -> Any:
        try:
            torch._dynamo.graph_break()
            return helper(x, n)
        finally:
            pass

    run = compiled(outer, dynamic=False)
    run(X, 2)
    run(X, 3)
    assert ("helper" in recompiles()[0].function) and recompiles()[0].source == "n"


def test_a_module_of_torchs_is_named_by_its_forward(compiled: Any, recompiles: Records) -> None:
    run = compiled(nn.Linear(4, 4), dynamic=False)
    run(torch.randn(2, 4))
    run(torch.randn(3, 4))
    (record,) = recompiles()
    assert (record.function, record.source) == ("Linear.forward", "input.size(0)")
    assert record.file.endswith("linear.py")


def test_arguments_below_a_decorator_have_their_names(compiled: Any, recompiles: Records) -> None:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return wrapper

    class Model(nn.Module):
        @decorate
        def forward(self, ids: Any, mask: Any) -> Any:
            return ids * 2 + mask.sum()

    run = compiled(Model(), dynamic=False)
    run(X, mask=X.clone())
    run(X, mask=torch.randn(5))
    run(torch.randn(6), mask=torch.randn(5))
    assert [r.source for r in recompiles()] == ["mask.size(0)", "ids.size(0)"]


def test_the_newest_of_equally_close_entries_is_blamed(compiled: Any, recompiles: Records) -> None:
    """Sizes that grow together are one change: a cache that grows is not blamed on its first, empty state."""

    def append(cache: Any, x: Any) -> Any:
        if not cache:
            cache.extend([x * 2, x * 3])
        else:
            cache[0], cache[1] = torch.cat([cache[0], x]), torch.cat([cache[1], x])
        return cache[0].sum() + cache[1].sum()

    run, cache = compiled(append, dynamic=False), []
    for _ in range(4):
        run(cache, torch.randn(1))
    assert [(r.source, r.values) for r in recompiles()] == [
        ("len(cache)", ["0", "2"]),
        ("cache[0].size(0)", ["1", "2", "3"]),
    ]


def test_seconds_are_those_of_the_compile(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x: x * 2, dynamic=False)
    run(X)
    run(torch.randn(5))
    (record,) = recompiles()
    assert record.seconds is not None
    assert 0 < record.seconds < 60


def test_nothing_is_told_of_a_first_compile_nor_of_calls_that_match(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x: x * 2)
    run(X)
    run(X)
    assert recompiles() == []


def test_reset_in_between_is_no_recompile(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x, n: x * n, dynamic=False)
    run(X, 2)
    torch._dynamo.reset()
    run(X, 3)
    assert recompiles() == []
    run(X, 4)
    assert [(r.before, r.after) for r in recompiles()] == [("3", "4")]


def test_the_call_that_meets_the_limit_is_no_recompile(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x, n: x.reshape(n, -1), dynamic=False)
    y = torch.randn(2520)
    with torch._dynamo.config.patch(recompile_limit=3):
        for n in (1, 2, 3, 4, 5):
            run(y, n)
    (record,) = recompiles()
    assert (record.count, record.values) == (2, ["1", "2", "3", "4"])


def test_two_changes_are_two_records(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x, n: x * n, dynamic=False)
    run(X, 2)
    run(X, 3)
    run(X.double(), 3)
    assert [(r.cause, r.source) for r in recompiles()] == [("int", "n"), ("dtype", "x.dtype")]


def test_several_collectors_see_the_same(compiled: Any, recompiles: Records) -> None:
    second = RecompileCollector()
    second.install()
    try:
        run = compiled(lambda x, n: x * n, dynamic=False)
        run(X, 2)
        run(X, 3)
        assert [r.source for r in second.records()] == [r.source for r in recompiles()] == ["n"]
    finally:
        second.uninstall()
    run(X, 4)
    assert [r.count for r in second.records()] == [1]
    assert [r.count for r in recompiles()] == [2]


def test_originals_are_back_after_uninstall() -> None:
    from torch._dynamo import convert_frame

    before = (convert_frame._compile, convert_frame.CatchErrorsWrapper.__call__)
    watched = hasattr(before[0], "__wrapped__")  # by the backend's own recording, which another test has begun
    collector = RecompileCollector()
    collector.install()
    assert (convert_frame._compile is before[0]) == watched
    collector.uninstall()
    assert (convert_frame._compile, convert_frame.CatchErrorsWrapper.__call__) == before


def test_threads(compiled: Any, recompiles: Records) -> None:
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for size in (3, 5):
                run(torch.randn(size), n)
        except BaseException as error:  # noqa: BLE001  # handed to the test's own thread
            failures.append(error)

    run = compiled(lambda x, n: x * n, dynamic=False)
    run(torch.randn(2), 9)  # else two threads may both find nothing compiled, and neither compiles again
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(record.count for record in recompiles()) == 6
    assert {record.source for record in recompiles()} <= {"n", "x.size(0)"}


def test_what_users_define_is_not_called(compiled: Any, recompiles: Records) -> None:
    class Loud:
        def __init__(self, scale: Any) -> None:
            self.scale = scale

        def __repr__(self) -> str:
            raise AssertionError("repr was called")

        def __len__(self) -> int:
            raise AssertionError("len was called")

    run = compiled(lambda x, thing: x * thing.scale, dynamic=False)
    run(X, Loud(2))
    run(X, Loud(3))
    assert [(r.source, r.after) for r in recompiles()] == [("thing.scale", "3")]
