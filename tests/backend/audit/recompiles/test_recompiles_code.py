"""Changes as they come in whole models and programs: what is in a function's place, modules' own tensors, decorators,
functions that run by themselves behind a break, threads. Sources, values and what is advised."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optpass.backend.audit import recompile_fixes
from optpass.backend.audit.explain import _unknown
from optpass.backend.audit.findings import THREADS, Finding
from optpass.backend.audit.remembered import THREAD
from optpass.reporting.audit.model import Recompile

X = torch.randn(4)
Records = Callable[[], list[Recompile]]


class Holder(nn.Module):
    """Calls what it holds."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Any) -> Any:
        return self.act(x)


def first(x: Any) -> Any:
    return x + 1


def second(x: Any) -> Any:
    return x + 2


class Callable_:
    def __call__(self, x: Any) -> Any:
        return x * 2


@pytest.mark.parametrize(
    ("other", "after"),
    [
        (second, "second"),
        (torch.sin, "sin"),
        (Callable_(), "Callable_ object"),
        (functools.partial(first), "partial object"),
    ],
    ids=["function", "builtin", "object", "partial"],
)
def test_a_function_is_replaced(check: Any, other: Any, after: str) -> None:
    """Dynamo compares the code of functions: what has none is no attribute that went missing."""

    def script(compiled: Any) -> None:
        module = Holder(first)
        run = compiled(module)
        run(X)
        module.act = other
        run(X)

    check(script, "module attribute", "self.act", "first", after)


def test_a_closed_over_function_is_replaced(check: Any) -> None:
    def script(compiled: Any) -> None:
        act: Any = first
        run = compiled(lambda x: act(x))
        run(X)
        act = torch.sin
        run(X)

    check(script, "closure", "act", "first", "sin")


class Held(nn.Module):
    factor = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8))
        self.heads = nn.ParameterDict({"a": torch.ones(8)})
        self.scales = nn.ParameterList([torch.ones(4)])
        self.drops = nn.ModuleDict({"enc": nn.Dropout(0.25)})
        self.window: int | None = None

    def forward(self, x: Any) -> Any:
        for scale in self.scales:
            x = x * scale
        if self.window is not None:
            x = x.tril(self.window)
        return self.drops["enc"](x) * self.factor + self.table.sum() + self.heads["a"].sum()


def changed(change: Callable[[Held], None]) -> Callable[[Any], None]:
    def script(compiled: Any) -> None:
        module = Held()
        run = compiled(module)
        run(torch.ones(4, 4))
        change(module)
        try:
            run(torch.ones(4, 4))
        finally:
            Held.factor = 2

    return script


def longer_table(m: Held) -> None:
    m.table = torch.ones(16)


def longer_head(m: Held) -> None:
    m.heads["a"] = nn.Parameter(torch.ones(16))


def more_scales(m: Held) -> None:
    m.scales.append(nn.Parameter(torch.ones(4)))


def drop_more(m: Held) -> None:
    m.drops["enc"].p = 0.5  # type: ignore[assignment]


def window(m: Held) -> None:
    m.window = 1


def factor(m: Held) -> None:
    Held.factor = 3


@pytest.mark.parametrize(
    ("change", "told", "advised", "not_advised"),
    [
        (longer_table, ("shape", "self.table.size(0)", "8", "16"), "a buffer of a module", "dynamic=True"),
        (longer_head, ("shape", "self.heads['a'].size(0)", "8", "16"), "force_parameter_static_shapes", "dynamic=True"),
        (more_scales, ("list length", "len(self.scales)", "1", "2"), "number of items", "_size"),
        (drop_more, ("module attribute", "self.drops['enc'].p", "0.25", "0.5"), "before the first", "register_buffer"),
        (window, ("module attribute", "self.window", "None", "1"), "before the first call", "register_buffer"),
        (factor, ("module attribute", "type(self).factor", "2", "3"), "self.register_buffer('factor'", "type(self)"),
    ],
    ids=["buffer", "parameter", "parameter-list", "of-torch", "none", "of-the-class"],
)  # fmt: skip
def test_what_a_module_holds(
    check: Any, recompiles: Records, change: Any, told: tuple[str, str, str, str], advised: str, not_advised: str
) -> None:
    check(changed(change), *told)
    text = recompiles()[0].fix.text
    assert advised in text and not_advised not in text


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        return x + self.table.sum() + self.weight.sum()


class OfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.norm.weight.sum()


@pytest.mark.parametrize(
    ("kind", "held"),
    [(Own, "table"), (Own, "weight"), (OfTorch, "norm.weight")],
    ids=["buffer", "parameter", "of-torch"],
)
def test_sizes_of_what_a_module_holds_can_be_made_dynamic_as_advised(recompiles: Records, kind: Any, held: str) -> None:
    """Without the settings a mark does nothing: that is why they are named."""

    def compiles(settings: dict[str, bool]) -> int:
        torch._dynamo.reset()
        counter = 0

        def backend(graph: Any, inputs: Any) -> Any:
            nonlocal counter
            counter += 1
            return graph

        module = kind()
        run = torch.compile(module, backend=backend)
        path, _, name = held.rpartition(".")
        owner = module.get_submodule(path)
        with torch._dynamo.config.patch(settings):
            for size in (8, 16, 24):
                tensor = torch.ones(size)
                setattr(owner, name, tensor if name == "table" else nn.Parameter(tensor))
                torch._dynamo.mark_dynamic(getattr(owner, name), 0)
                run(X)
        return counter

    assert compiles({}) == 3
    settings = re.findall(r"torch\._dynamo\.config\.(\w+) = False", recompiles()[0].fix.text)
    assert compiles(dict.fromkeys(settings, False)) == 1


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @decorated
    def forward(self, x: Any) -> Any:
        return x + 1


def test_below_a_decorator_the_function_is_the_modules_own(compiled: Any, recompiles: Records) -> None:
    run = compiled(Decorated())
    for size in (3, 5):
        run(torch.randn(size))
    (record,) = recompiles()
    assert (record.function, record.source) == ("Decorated.forward", "x.size(0)")
    assert record.line == Decorated.forward.__wrapped__.__code__.co_firstlineno


def helper(y: Any) -> Any:
    torch._dynamo.graph_break()
    return y.sin()


def test_of_a_function_that_its_caller_breaks_at_no_mark_is_advised(compiled: Any, recompiles: Records) -> None:
    """A mark in the caller, which is compiled too, would be refused."""
    run = compiled(lambda x: helper(x * 2) + 1)
    for size in (3, 5):
        run(torch.randn(size))
    texts = {record.function.rpartition(".")[2]: record.fix.text for record in recompiles() if record.source[0] != "<"}
    assert "mark_dynamic(x, 0)" in texts["<lambda>"]
    assert "mark_dynamic" not in texts["helper"] and "compiled by itself" in texts["helper"]


def test_an_argument_of_a_function_that_goes_on_behind_its_break_is_still_marked(
    compiled: Any, recompiles: Records
) -> None:
    def function(x: Any, n: Any) -> Any:
        n = n + 1
        torch._dynamo.graph_break()
        return x * n

    run = compiled(function)
    for size in (3, 5):
        run(torch.randn(size), torch.ones(()))
    assert ["mark_dynamic(x, 0)" in record.fix.text for record in recompiles()] == [True]


def test_values_without_a_name_are_told_by_the_line_of_the_break(compiled: Any, recompiles: Records) -> None:
    def function(x: Any) -> Any:
        if x.sum().item() > 0:
            return x + 1
        return x - 1

    run = compiled(function)
    run(X.abs())
    run(X.abs() + 1)
    (record,) = recompiles()
    line = function.__code__.co_firstlineno + 1
    assert record.source == f"<value of line {line}>"
    assert record.fix.text.startswith(f"<value of line {line}> is computed in front of the graph break in line {line}")


def test_buckets_reach_to_the_longest_of_many_lengths(compiled: Any, recompiles: Records) -> None:
    run = compiled(lambda x: x.sin(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=200, accumulated_recompile_limit=200):
        for length in range(2, 82):
            run(torch.randn(length))
    (record,) = recompiles()
    assert len(record.values) == 64 and int(record.fix.text.rstrip(".").rpartition(" ")[2]) >= 81


def test_another_backend_is_told_in_the_guards(compiled: Any, recompiles: Records) -> None:
    compiled(first)(X)
    compiled(first, backend="aot_eager")(X)
    assert recompiles()[0].guards == ["torch.compile's backend == eager, now aot_eager"]


def test_what_another_thread_compiled_meanwhile(compiled: Any) -> None:
    """Dynamo does not look again once it has waited for the other thread, and compiles the same once more."""

    class Entry:
        class guard_manager:  # as Dynamo's entries name it
            @staticmethod
            def check_verbose(local: Any) -> Any:
                class Info:
                    result = True

                return Info

    class Call:
        local: dict[str, Any] = {}  # noqa: RUF012

    other = _unknown(Entry, Call, {THREAD: str(threading.get_ident() + 1)})  # type: ignore[arg-type]
    same = _unknown(Entry, Call, {THREAD: str(threading.get_ident())})  # type: ignore[arg-type]
    assert (other.source, same) == (THREADS, Finding("other", "", "", ""))
    assert "in one thread before others" in recompile_fixes.advice(other, [], 1, None)


@pytest.mark.parametrize(
    ("start", "options", "compiles", "told"),
    [
        (0.5, {}, 2, "one more when it changes"),
        (0.5, {"dynamic": False}, 4, "with dynamic=False"),
        (1, {}, 4, "for each value of this Python number"),
    ],
    ids=["float", "static", "int-of-a-module"],
)
def test_what_is_said_of_numbers_is_what_dynamo_does(
    compiled: Any, recompiles: Records, logged: list[str], start: Any, options: Any, compiles: int, told: str
) -> None:
    module = Scaled(start)
    run = compiled(module, **options)
    for _ in range(4):
        run(X)
        module.scale += start
    (record,) = recompiles()
    if record.count != compiles - 1 and not torch.__version__.startswith("2.13."):
        compiles, told = len(logged) + 1, "for each value of this Python number"  # what torch 2.11 does with any
    assert record.count == compiles - 1
    assert told in record.fix.text


class Scaled(nn.Module):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Any) -> Any:
        return x * self.scale


def test_functions_of_one_decorator_are_told_apart(compiled: Any, recompiles: Any) -> None:
    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, x: Any) -> Any:
            return function(self, x)

        return wrapper

    class First(torch.nn.Module):
        @decorated
        def forward(self, x: Any) -> Any:
            return x + 1

    class Second(torch.nn.Module):
        @decorated
        def forward(self, x: Any) -> Any:
            return x * 2

    compiled(First())(X)
    torch.compile(Second(), backend="aot_eager")(X)
    (record,) = recompiles()
    assert (record.cause, record.source) == ("closure", "function")
    assert (record.before.split(".")[-2:], record.after.split(".")[-2:]) == (
        ["First", "forward"],
        ["Second", "forward"],
    )
    assert "share their code" in record.fix.text
