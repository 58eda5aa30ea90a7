"""The silent eager ledger: every scripted way to run eager without a word is told, with its calls, and nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from optpass.backend.audit.silent import SilentCollector
from optpass.reporting.audit.model import SilentEager

X = torch.randn(4)
Ledger = Callable[[], list[SilentEager]]


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, **({"backend": "eager"} | options))


def told(ledger: Ledger) -> list[tuple[str, str, int | None]]:
    return [(r.kind, r.function.rpartition(".")[2], r.calls) for r in ledger()]


def early(x: Any, leave: Any) -> Any:
    if leave:
        return x
    return x * 2


class Early(nn.Module):
    def forward(self, x: Any, leave: bool = False) -> Any:
        return x if leave else x * 2


def ints(x: Any, n: Any) -> Any:
    return x.reshape(n, -1)


def failing(gm: Any, inputs: Any) -> Any:
    raise ValueError("no such operation")


def limit(name: str = "recompile_limit") -> None:
    run, y = compiled(ints, dynamic=False), torch.randn(2520)
    with torch._dynamo.config.patch({name: 2}):
        for n in (1, 2, 3, 4):
            run(y, n)
        run(y, 1)


def limit_outside() -> None:
    limit()
    run = compiled(ints, dynamic=False)
    run(torch.randn(2520), 5)


def accumulated() -> None:
    limit("accumulated_recompile_limit")


def limit_of_a_module() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            return x * n

    run = compiled(Scaled(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (1, 2, 3):
            run(X, n)


def limit_behind_a_break() -> None:
    def broken(x: Any, n: Any) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        return x * n

    run = compiled(broken, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in (1, 2, 3):
            run(X, n)


def poisoned_at_first() -> None:
    run = compiled(early)
    run(X, True)
    run(X, False)
    run(X, False)


def poisoned_later() -> None:
    run = compiled(early)
    run(X, False)
    run(X, True)
    run(X, False)
    run(X, False)


def poisoned_module() -> None:
    run = compiled(Early())
    run(X, True)
    run(X)


def poisoned_by_a_loop() -> None:
    def total(xs: Any) -> Any:
        result = None
        for x in xs:
            result = x * 2
        return result

    run = compiled(total)
    run([])
    run([X])


def poisoned_behind_a_break() -> None:
    def broken(x: Any, leave: Any) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        if leave:
            return x
        return x * 2

    run = compiled(broken)
    run(X, True)
    run(X, False)


def poisoned_helper() -> None:
    def outer(x: Any, leave: Any) -> Any:
        try:
            torch._dynamo.graph_break()
            return early(x, leave)
        finally:
            pass

    run = compiled(outer)
    run(X, True)
    run(X, False)


def whole_frame_skipped() -> None:
    def looping(x: Any) -> Any:
        x = x * 2
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + 1
        return x

    run = compiled(looping)
    for _ in range(3):
        run(X)


def generator() -> None:
    def parts(x: Any) -> Any:
        yield x * 2

    run = compiled(parts)
    list(run(X))
    list(run(X))


def backend_error() -> None:
    def double(x: Any) -> Any:
        return x * 2

    with torch._dynamo.config.patch(suppress_errors=True):
        run = compiled(double, backend=failing)
        for _ in range(3):
            run(X)


def dispatch_mode() -> None:
    def square(x: Any) -> Any:
        return x * x

    run = compiled(square)
    with FlopCounterMode(display=False):
        run(X)
    run(X)


def disabled_by_config() -> None:
    def inner(x: Any) -> Any:
        return x * 3

    def double(x: Any) -> Any:
        return inner(x) * 2

    with torch._dynamo.config.patch(disable=True):
        run = compiled(double)
        run(X)
        run(X)


def disabled_module_by_config() -> None:
    with torch._dynamo.config.patch(disable=True):
        run = compiled(Early())
        run(X)
        run(X)


def disabled_by_argument() -> None:
    compiled(early, disable=True)(X, False)


def stance_eager() -> None:
    run = compiled(early)
    run(X, False)
    with torch.compiler.set_stance("force_eager"):
        run(X, False)
        run(X, False)
    run(X, False)


def stance_eager_for_a_module() -> None:
    run = compiled(Early())
    with torch.compiler.set_stance("force_eager"):
        run(X)


def stance_on_recompile() -> None:
    run = compiled(ints, dynamic=False)
    y = torch.randn(12)
    run(y, 2)
    with torch.compiler.set_stance("eager_on_recompile"):
        run(y, 2)
        run(y, 3)
        run(y, 4)
        run(y, 2)


def stance_as_a_decorator() -> None:
    @torch.compiler.set_stance("force_eager")
    def step() -> Any:
        return run(X, False)

    run = compiled(early)
    step()
    step()


def never_called() -> None:
    def double(x: Any) -> Any:
        return x * 2

    compiled(double)
    double(X)


def poisoned_by_a_memo() -> None:
    memo: dict[int, Any] = {}

    def remembered(x: Any, n: int) -> Any:
        try:
            return memo[n]
        except KeyError:
            memo[n] = made = x * 2
            return made

    run = compiled(remembered)
    for _ in range(3):
        run(X, 1)


def poisoned_by_another_instance() -> None:
    class Around(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    for inner in (torch.nn.Identity(), torch.nn.Tanh(), torch.nn.Tanh()):
        compiled(Around(inner))(X)


def module_never_called() -> None:
    model = Early()
    compiled(model)
    model(X)


CASES = [
    (limit, ("recompile limit", "ints", 2)),
    (limit_outside, ("recompile limit", "ints", 3)),
    (accumulated, ("recompile limit", "ints", 2)),
    (limit_of_a_module, ("recompile limit", "forward", 2)),
    (limit_behind_a_break, ("recompile limit", "broken", 1)),
    (poisoned_at_first, ("skip poisoned", "early", 3)),
    (poisoned_later, ("skip poisoned", "early", 3)),
    (poisoned_module, ("skip poisoned", "forward", 2)),
    (poisoned_by_a_loop, ("skip poisoned", "total", 2)),
    (poisoned_behind_a_break, ("skip poisoned", "broken", 2)),
    (poisoned_helper, ("skip poisoned", "early", 2)),
    (poisoned_by_a_memo, ("skip poisoned", "remembered", 2)),
    (poisoned_by_another_instance, ("skip poisoned", "forward", 3)),
    (whole_frame_skipped, ("frame skipped", "looping", 3)),
    (generator, ("frame skipped", "parts", 2)),
    (backend_error, ("backend error suppressed", "double", 3)),
    (dispatch_mode, ("frame skipped", "square", 2)),
    (disabled_by_config, ("compile disabled", "double", 2)),
    (disabled_module_by_config, ("compile disabled", "forward", 2)),
    (disabled_by_argument, ("compile disabled", "early", None)),
    (stance_eager, ("compile disabled", "early", 2)),
    (stance_eager_for_a_module, ("compile disabled", "forward", 1)),
    (stance_on_recompile, ("compile disabled", "ints", 2)),
    (stance_as_a_decorator, ("compile disabled", "early", 2)),
    (never_called, ("not compiled", "double", None)),
    (module_never_called, ("not compiled", "forward", None)),
]


@pytest.mark.parametrize(("script", "expected"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_way_is_told(ledger: Ledger, script: Any, expected: tuple[str, str, int | None]) -> None:
    torch._dynamo.utils.counters.clear()
    script()
    if script is dispatch_mode and torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        assert not told(ledger)  # since torch 2.14, it is compiled under the mode too
        return
    assert expected in told(ledger)
    (record,) = [r for r in ledger() if r.kind == expected[0]]
    assert record.line
    assert record.reason
    assert record.fix.text
    assert record.file.endswith("test_silent.py")


def lookup(memo: dict[str, Any], name: str) -> Any:
    try:
        return memo[name]
    except KeyError:
        return None


def lookup_or_raise(memo: dict[str, Any], name: str) -> Any:
    with contextlib.nullcontext():
        try:
            return memo[name]
        except KeyError as error:
            raise ValueError(f"no {name}") from error


def lookup_behind_a_context(memo: dict[str, Any], name: str) -> Any:
    with contextlib.nullcontext():
        found = memo[name]
    return found, memo


@pytest.mark.parametrize("function", [lookup_behind_a_context, lookup, lookup_or_raise])
def test_what_only_may_raise_has_one_way(ledger: Ledger, function: Any) -> None:
    run = compiled(function)
    run({"a": 1}, "a")
    run({"a": 1}, "a")
    assert not told(ledger)


def test_what_dynamo_does_not_ask_about_may_have_been_called(ledger: Ledger) -> None:
    def first(xs: Any) -> Any:
        return xs[0]

    for _ in range(2):
        compiled(first)([X])
    assert not told(ledger)


@pytest.mark.parametrize("script", [limit, poisoned_at_first, poisoned_later, stance_on_recompile, disabled_by_config])
def test_nothing_else_is_told(ledger: Ledger, script: Any) -> None:
    script()
    assert len(ledger()) == 1


def test_what_goes_on_behind_a_break_is_told_by_its_line(ledger: Ledger) -> None:
    poisoned_behind_a_break()
    (record,) = ledger()
    line = record.line + 2 if record.line else 0
    assert f"behind the graph break in line {line}" in record.reason
    assert record.fix.text.startswith(f"Solve the graph break in line {line}")


def test_a_check_behind_a_break_is_nothing_to_compile(ledger: Ledger) -> None:
    """Whichever way it takes, nothing is computed: it returns, or raises."""

    def checked(x: Any) -> Any:
        x = x * 2
        if not (x > 0).all().item():
            raise ValueError("negative")
        return x

    run = compiled(checked)
    run(X.abs() + 1)
    run(X.abs() + 1)
    assert ledger() == []


def test_functions_of_python_itself_are_nobodys_loss(ledger: Ledger) -> None:
    """`Logger.debug` returns early where it says nothing; it is asked about only as its caller runs eager."""
    log = logging.getLogger("quiet")

    def chatty(x: Any) -> Any:
        try:
            x = x * 2
            log.debug("x")
        finally:
            x = x + 1
        return x

    compiled(chatty)(X)
    assert [record.kind for record in ledger()] == ["frame skipped"]


def test_environment(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    compiled(early)(X, False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    (record,) = ledger()
    assert record.kind == "compile disabled"
    assert "TORCHDYNAMO_DISABLE" in record.reason


def test_healthy_functions_are_not_told(ledger: Ledger) -> None:
    def helper(x: Any) -> Any:
        return x.shape[0]

    def broken(x: Any) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        return x * helper(x)

    run, model = compiled(broken), compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for _ in range(3):
        run(X)
        model(X)
    compiled(lambda x: [x * 2])(X)
    assert ledger() == []


def test_a_function_called_in_another_compiled_one_is_not_told(ledger: Ledger) -> None:
    inner, model = compiled(early), compiled(Early())
    compiled(lambda x: inner(x + 1, False) + model(x))(X)
    assert ledger() == []


def test_the_limits_last_change_is_named(ledger: Ledger) -> None:
    limit()
    (record,) = ledger()
    assert "n (was 2, now 3; cause: int)" in record.reason
    assert "recompile_limit = 4" in record.fix.text


def test_behaviour_is_that_without_an_audit() -> None:
    """Compiled or eager, and how often the backend is called: the same with a ledger, and behind it."""

    def run(audited: bool) -> list[Any]:
        torch._dynamo.reset()
        calls: list[int] = []

        def backend(gm: Any, inputs: Any) -> Any:
            calls.append(len(gm.graph.nodes))
            return gm

        collector = SilentCollector()
        if audited:
            collector.install()
        for leave in (False, True, False):
            compiled(early, backend=backend)(X, leave)
        numbers, y = compiled(ints, backend=backend, dynamic=False), torch.randn(2520)
        with torch._dynamo.config.patch(recompile_limit=2):
            for n in (1, 2, 3, 1, 4):
                numbers(y, n)
        if audited:
            collector.uninstall()
        compiled(early, backend=backend)(X, False)
        numbers(y, 7)
        numbers(y, 2)
        return calls

    assert run(True) == run(False)
