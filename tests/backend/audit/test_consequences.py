"""What follows from what, whose function it is, and that the audit's own code stays out of what Dynamo compiles."""

from __future__ import annotations

import array
import contextlib
import copy
import enum
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from optpass.backend.audit.breaks import only_roots
from optpass.backend.audit.recording import Recording
from optpass.backend.compat.hooks import HookPoint
from optpass.reporting.audit.model import Audit


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def audited(function: Any, *calls: tuple[Any, ...]) -> Audit:
    with Recording() as recording:
        compiled = torch.compile(function, backend="eager")
        for arguments in calls:
            compiled(*arguments)
    return recording.result()


def scaled(factor: Any) -> Callable[..., Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * factor

    return fn


def test_the_part_behind_is_charged_to_the_break_where_the_function_closes_over_variables() -> None:
    (found,) = audited(scaled(3.0), (torch.ones(3),)).breaks
    assert found.cost.compile_s is not None and found.cost.compile_s > 0


def test_a_manager_that_a_broken_call_made_follows_from_the_call() -> None:
    @contextlib.contextmanager
    def manager() -> Any:  # not a generator function: contextlib cannot be traced
        return iter([None])

    def fn(x: torch.Tensor) -> torch.Tensor:
        with manager():
            return x + 1

    found = audited(fn, (torch.ones(3),)).breaks
    roots = only_roots(found)
    assert {(root.owner, root.user_line) for root in roots} == {("library", fn.__code__.co_firstlineno + 1)}
    entering = [record for record in found if record.gb_type == "Unsupported context manager"]
    assert not [record for record in entering if record.caused_by is None]
    assert len(roots) == 1 or not entering  # torch 2.14 knows what the call made, and breaks in what it does


def test_what_iterates_over_the_result_of_a_broken_call_follows_from_it() -> None:
    pattern = re.compile("a")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + len(tuple(pattern.finditer("banana")))

    found = audited(fn, (torch.ones(3),)).breaks
    assert len(found) > 1 and len(only_roots(found)) == 1


def test_a_generator_that_eager_code_runs_follows_from_the_line_that_runs_it() -> None:
    def values() -> Iterator[int]:
        yield 1
        yield 2

    def fn(x: torch.Tensor, given: Iterator[int]) -> torch.Tensor:
        array.array("b", given)
        return x + 1

    found = audited(fn, (torch.ones(3), values())).breaks
    assert len(found) > 1 or not torch.__version__.startswith("2.13.")  # later ones do not try generators
    assert [record.line for record in only_roots(found)] == [fn.__code__.co_firstlineno + 1]


def test_two_breaks_on_one_line_stay_two() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * y.sum().item() + y.mean().item()

    assert len(only_roots(audited(fn, (torch.ones(3),)).breaks)) == 2


def test_two_breaks_in_libraries_stay_two() -> None:
    def fn(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        y = x + 1
        copy.deepcopy(module)
        y = y * 2
        json.dumps({"a": 1})
        return y + 1

    found = only_roots(audited(fn, (torch.ones(3), nn.Linear(2, 2))).breaks)
    first = fn.__code__.co_firstlineno
    assert {record.user_line or record.line for record in found} == {first + 2, first + 4}


def test_hooks_are_not_compiled_where_dynamo_is_on() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.compile(inner, backend="eager")(x) + 1

    found = audited(fn, (torch.ones(3),), (torch.ones(3),))
    assert {record.file for record in (*found.breaks, *found.functions)} == {__file__}


def test_a_module_of_torch_is_named_as_what_it_is() -> None:
    found = audited(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), *((torch.ones(2, 3),),) * 3)
    assert [record.function for record in found.functions] == ["Sequential.forward"]
    assert found.functions[0].calls == 3


def test_a_recording_of_one_backend_keeps_what_torch_wraps() -> None:
    with Recording(backend="eager") as recording:
        compiled = torch.compile(nn.ReLU(), backend="eager", dynamic=False)
        for size in (2, 3):
            compiled(torch.ones(size))
    (found,) = recording.result().recompiles
    assert (found.cause, found.source) == ("shape", "input.size(0)")


def test_a_module_of_torch_that_is_never_called_is_named_by_its_class() -> None:
    with Recording() as recording:
        module = nn.Linear(2, 2)
        module.compile(backend="eager")
    (found,) = recording.result().silent_eager
    assert (found.kind, found.function, found.file) == ("not compiled", "Linear", __file__)


def test_inference_mode_is_told_as_such() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3)
    with Recording() as recording:
        compiled = torch.compile(fn, backend="eager")
        with torch.no_grad():
            compiled(x)
        with torch.inference_mode():
            compiled(x)
    (found,) = recording.result().recompiles
    assert (found.cause, found.source) == ("grad mode", "torch.is_inference_mode_enabled()")
    assert (found.before, found.after) == ("False", "True")


class Mode(enum.IntEnum):
    FAST = 1
    EXACT = 2


def test_a_member_of_an_enum_chooses_the_code() -> None:
    def fn(x: torch.Tensor, mode: Mode) -> torch.Tensor:
        return x * 2 if mode == Mode.FAST else x - 1

    (found,) = audited(fn, (torch.ones(3), Mode.FAST), (torch.ones(3), Mode.EXACT)).recompiles
    assert (found.before, found.after) == ("Mode.FAST", "Mode.EXACT")
    assert "enum member" in found.fix.text


def test_a_value_computed_in_front_of_a_break_points_to_the_break() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.sum().item()
        return x * n

    found = audited(fn, (torch.ones(3),), (torch.zeros(3),)).recompiles
    line = fn.__code__.co_firstlineno + 1
    assert found and all(f"the graph break in line {line}" in record.fix.text for record in found)


def test_a_change_that_also_reaches_the_part_behind_a_break_is_one_change() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * x

    (first, *_) = [r for r in audited(fn, (torch.ones(3),), (torch.ones(5),)).recompiles if r.source == "x.size(0)"]
    assert first.count == 2 and first.fix.text.startswith("Call torch._dynamo.mark_dynamic(x, 0)")


def test_a_fork_forgets_watchers_and_locks() -> None:
    point = HookPoint("torch._dynamo.utils", "counters", (), "nothing")
    point._lock.acquire()
    before = point._lock
    point.after_fork()
    assert point._lock is not before and point._lock.acquire(blocking=False)


def test_every_part_says_how_it_was_observed() -> None:
    hooks = Recording().result().hooks
    assert hooks["recompiles"] == "ok" and hooks["silent eager"] == "ok" and hooks["breaks"] == "ok"
