"""What a recording does while somebody compiles: little, and nothing that slows what it watches."""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from optpass.backend.audit import eager_calls, never_compiled, remembered
from optpass.backend.audit.containers import keys_of
from optpass.backend.audit.recording import Recording
from optpass.backend.audit.standing import STANDING
from optpass.backend.compat import audit_entry, audit_guards, hooks
from optpass.backend.compat.hooks import HookPoint


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No recording of the backend's own, so that hooks come and go with the test's."""
    STANDING.end()
    yield
    STANDING.begin()


def compile_call(local: dict[str, Any]) -> audit_guards.CompileCall:
    return audit_guards.CompileCall(compile_call.__code__, local, {}, (), None, (), "0/0")


class NoConditions:
    """A guard manager without conditions."""

    root = None


def test_a_compile_runs_with_room_on_the_stack() -> None:
    from torch._dynamo import convert_frame

    plain = convert_frame._compile.__code__.co_stacksize
    with Recording():
        assert convert_frame._compile.__code__.co_stacksize > plain + 10_000
    assert convert_frame._compile.__code__.co_stacksize == plain


def test_few_calls_for_each_function_that_dynamo_inlines() -> None:
    ours = ("<optpass>", hooks.__file__, never_compiled.__file__, eager_calls.__file__)
    counted = {"inlined": 0, "ours": 0}

    def count(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            counted["ours"] += name.startswith(ours) and "eval_frame" not in name  # not what switches Dynamo on and off
            counted["inlined"] += frame.f_code.co_name == "optpass_hook" and "symbolic_convert" in name

    def calls(layers: int) -> tuple[int, int]:
        torch._dynamo.reset()
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        counted.update(inlined=0, ours=0)
        with Recording():
            sys.setprofile(count)
            try:
                torch.compile(model, backend="eager")(torch.randn(2, 4))
            finally:
                sys.setprofile(None)
        return counted["ours"], counted["inlined"]

    few, many = calls(5), calls(25)
    assert many[1] - few[1] >= 20
    assert (many[0] - few[0]) / (many[1] - few[1]) <= 5


def test_no_file_is_looked_for_in_tracebacks_through_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    stat = os.stat
    with Recording():
        name = audit_guards.COMPILE.file_name
        linecache.checkcache(name)
        monkeypatch.setattr(os, "stat", lambda path, *a, **k: looked.append(str(path)) or stat(path, *a, **k))
        assert linecache.getline(name, 1) == "" and not looked


def test_a_point_that_takes_more_than_one_argument_is_refused_where_one_is_passed() -> None:
    assert audit_entry.INLINED.problem() is None
    point = HookPoint(
        "torch._dynamo.symbolic_convert", "InstructionTranslatorBase.push_many", (), "x", before_only=True
    )
    assert "not one argument" in (point.problem() or "")


def test_texts_of_what_was_there_are_made_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    describe = remembered.describe
    monkeypatch.setattr(remembered, "describe", lambda value: made.append(value) or describe(value))

    class Config:
        def __init__(self) -> None:
            self.sizes = {"a": 1, "b": {3: 4}}

    config, key = Config(), object()
    found = remembered.remember(NoConditions, compile_call({"config": config, "odd": {key: 1}, "many": [{}]}))
    assert made == [[key]]  # an object of the user's is not held
    config.sizes.clear()
    assert found[keys_of("L['config'].sizes")] == "['a', 'b']"
    assert found[keys_of("L['config'].sizes['b']")] == "[3]"
    assert found[keys_of("L['many'][0]")] == "[]"
    assert found.get(keys_of("L['odd']")) == describe([key])
    assert found.get("nothing", "else") == "else"
