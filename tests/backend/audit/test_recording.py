"""Recordings: nested, from threads, left alone by errors of our own, and what remains without a hook."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import optpass
from optpass.backend.audit.breaks import only_roots
from optpass.backend.audit.calls import ENOUGH
from optpass.backend.audit.recording import Recording
from optpass.backend.audit.standing import STANDING
from optpass.backend.audit.watch import WATCH
from optpass.backend.compat import audit as dynamo
from optpass.backend.compat import hooks, self_test
from optpass.reporting.audit.model import Audit
from optpass.reporting.html import render_html
from optpass.reporting.merge import merge
from optpass.reporting.terminal import render_report

Program = Callable[[str], ModuleType]
Record = Callable[..., Audit]

BROKEN = "def f(x):\n    y = x + 1\n    print('a')\n    return y * 2\n"


@pytest.fixture(autouse=True)
def alone() -> Any:
    """No recording of the backend's own, so that hooks come and go with the test's."""
    STANDING.end()
    yield
    STANDING.begin()


def test_hooks_go_when_nobody_listens() -> None:
    before = [(p, getattr(*p._owner())) for p in dynamo.AUDIT_POINTS]
    with Recording():
        assert InstructionTranslatorBase.log_graph_break.__name__ == "optpass_hook"
    for point, original in before:
        assert getattr(*point._owner()) is original


def test_nested_recordings_see_what_happens_while_they_are_active(program: Program) -> None:
    module = program(BROKEN)
    x = torch.randn(4)
    with Recording() as outer:
        torch.compile(module.f, backend="eager")(x)
        torch._dynamo.reset()
        with Recording() as inner:
            torch.compile(module.f, backend="eager")(x)
        torch._dynamo.reset()
        torch.compile(module.f, backend="eager")(x)
    assert [b.occurrences for b in outer.result().breaks] == [3]
    assert [b.occurrences for b in inner.result().breaks] == [1]


def test_result_while_running_and_after_a_restart(program: Program) -> None:
    module = program(BROKEN)
    recording = Recording()
    recording.stop()  # not started: nothing happens
    recording.start()
    recording.start()
    torch.compile(module.f, backend="eager")(torch.randn(4))
    assert len(recording.result().breaks) == 1
    recording.stop()
    assert WATCH._listeners == (recording,)
    recording.stop()
    assert WATCH._listeners == ()
    assert len(recording.result().breaks) == 1


def test_threads(program: Program) -> None:
    modules = [program(BROKEN.replace("'a'", f"'{i}'")) for i in range(4)]
    with Recording() as recording:
        threads = [
            threading.Thread(target=lambda f=m.f: torch.compile(f, backend="eager")(torch.randn(4))) for m in modules
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    audit = recording.result()
    assert {b.file for b in audit.breaks} == {m.__file__ for m in modules}
    assert audit.summary.graphs == 8


def test_functions_calls_and_graphs(program: Program, record: Record) -> None:
    module = program(BROKEN)
    audit = record(module.f, torch.randn(4), calls=5)
    (function,) = audit.functions
    assert (function.function, function.line, function.calls) == ("f", 2, 5)
    assert (function.graphs, function.compiles, function.ops_captured) == (2, 1, 2)
    assert function.t_first_s is not None and function.t_steady_s is not None
    assert function.t_first_s > function.t_steady_s > 0
    assert function.compile_s > 0 and function.t_first_s > function.compile_s
    assert audit.summary.t_first_s == function.t_first_s


def test_steady_time_is_of_calls_without_a_compile(program: Program, record: Record) -> None:
    (function,) = record(program(BROKEN).f, torch.randn(4)).functions
    assert function.t_first_s is not None and function.t_steady_s is None


def test_functions_compiled_before_are_timed(program: Program) -> None:
    compiled = torch.compile(program(BROKEN).f, backend="eager")
    compiled(torch.randn(4))
    with Recording() as recording:
        for _ in range(3):
            compiled(torch.randn(4))
    (function,) = recording.result().functions
    assert (function.function, function.calls, function.compiles) == ("f", 3, 0)


def test_an_error_of_ours_never_reaches_the_user(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    module = program(BROKEN)
    monkeypatch.setattr("optpass.backend.audit.capture.logged_break", broken)
    with Recording() as recording:
        x = torch.randn(4)
        torch.testing.assert_close(torch.compile(module.f, backend="eager")(x), (x + 1) * 2)
    audit = recording.result()
    assert not audit.breaks
    assert any("RuntimeError: ours" in note for note in audit.notes)


def test_users_own_errors_pass_through(program: Program) -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        raise KeyError("mine")

    with Recording(), pytest.raises(Exception, match="mine"):
        torch.compile(program(BROKEN).f, backend=backend)(torch.randn(4))


@pytest.mark.parametrize("changed", ["missing", "signature"])
def test_without_the_hook_breaks_come_from_the_trace_log(
    changed: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = dynamo.LOG_GRAPH_BREAK
    if changed == "missing":
        monkeypatch.setattr(point, "path", "InstructionTranslatorBase.renamed_in_a_later_torch")
    else:
        monkeypatch.setattr(point, "parameters", ("self", "an_argument_of_a_later_torch"))
    module = program("""
        def callee(x):
            print("callee")
            return x + 1

        def f(x):
            if x.sum() > 0:
                x = x + 1
            for i in range(2):
                print(i)
            return x

        def g(x):
            return callee(x * 2) * 3
    """)
    with Recording() as recording:
        torch.compile(module.f, backend="eager")(torch.ones(4))
        torch.compile(module.g, backend="eager")(torch.ones(4))
    audit = recording.result()
    assert audit.hooks["breaks"].startswith("the structured trace log")
    assert any("columns" in text for text in self_test())
    found = {(b.line, b.gb_id) for b in only_roots(audit.breaks)}
    assert found == {(8, "GB0170"), (11, "GB0059"), (4, "GB0059")}
    assert all(b.file == module.__file__ for b in audit.breaks)
    loop = next(b for b in audit.breaks if b.gb_id == "GB7000")
    assert loop.caused_by is not None and loop.effect == "frame eager"
    assert next(b for b in audit.breaks if b.line == 8).cost.compile_s is not None
    assert not any(type(h).__name__ == "TraceHandler" for h in dynamo.trace_log().handlers)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "point", [p for p in dynamo.AUDIT_POINTS if p is not dynamo.LOG_GRAPH_BREAK], ids=lambda p: p.observes
)
def test_without_another_hook_breaks_stay(
    point: hooks.HookPoint, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "path", point.path + "_renamed")
    module = program(BROKEN)
    with Recording() as recording:
        torch.compile(module.f, backend="eager")(torch.randn(4))
    audit = recording.result()
    (found,) = audit.breaks
    assert (found.line, found.gb_id) == (4, "GB0059")
    told = [text for text in audit.hooks.values() if text != "ok"]
    assert len(told) == 1 and point.loses in told[0]


def test_patched_over_by_somebody_else(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()
    original = InstructionTranslatorBase.log_graph_break
    seen: list[str] = []
    with recording:
        ours = InstructionTranslatorBase.log_graph_break

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("theirs")
            return ours(self, *args, **kwargs)

        monkeypatch.setattr(InstructionTranslatorBase, "log_graph_break", theirs)
    with Recording() as second:
        torch.compile(program(BROKEN).f, backend="eager")(torch.randn(4))
    assert seen == ["theirs"]
    assert [b.occurrences for b in second.result().breaks] == [1]
    assert not recording.result().breaks
    monkeypatch.setattr(InstructionTranslatorBase, "log_graph_break", original)


def test_backend_records_by_itself(program: Program) -> None:
    STANDING.begin()
    module = program(BROKEN)
    x = torch.randn(4)
    compiled = torch.compile(module.f, backend="optpass", options={"inner": "eager"})
    compiled(x)
    torch.compile(lambda x: print("another backend") or x + 1, backend="eager")(x)
    audit = optpass.report().audit
    assert audit is not None
    assert [(b.line, b.occurrences) for b in audit.breaks] == [(4, 1)]
    assert audit.summary.graphs == 2
    optpass.reset_report()
    audit = optpass.report().audit
    assert audit is not None and not audit.breaks


def test_backend_records_nothing_where_told_so(program: Program) -> None:
    STANDING.begin()
    torch.compile(program(BROKEN).f, backend="optpass", options={"inner": "eager", "audit": False})(torch.randn(4))
    assert optpass.report().audit is None


def test_timing_rests_when_it_has_enough_and_goes_on_after_a_compile(program: Program) -> None:
    module = program(BROKEN)
    x = torch.randn(4)
    compiled = torch.compile(module.f, backend="eager", dynamic=False)
    with Recording() as recording:
        for _ in range(1000):
            compiled(x)
        assert WATCH.resting and not dynamo.ENTER_COMPILED._quick
        (function,) = recording.result().functions
        assert ENOUGH <= function.calls < 1000
        compiled(torch.randn(8))
        assert not WATCH.resting
        compiled(x)
        assert recording.result().functions[0].calls > function.calls
    assert not dynamo.ENTER_COMPILED._quick


def test_report_shows_and_merges_what_was_recorded(program: Program) -> None:
    STANDING.begin()
    module = program(BROKEN)
    torch.compile(module.f, backend="optpass", options={"inner": "eager"})(torch.randn(4))
    report = optpass.report()
    console = Console(width=200, record=True, file=io.StringIO())
    render_report(report, console)
    assert "1 graph break" in (text := console.export_text()) and "GB0059" in text
    assert "GB0059" in render_html(report)
    other = report.model_copy(deep=True)
    other.processes[0].pid += 1
    merged = merge([report, other])
    assert merged.audit is not None
    assert [b.occurrences for b in merged.audit.breaks] == [2]


def test_a_decorated_function_is_called_by_its_own_name(program: Program, record: Record) -> None:
    module = program("""
        import functools

        def decorate(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args)
            return wrapper

        class Net(torch.nn.Module):
            @decorate
            def forward(self, x):
                return x + 1
    """)
    names = [f.function for f in record(module.Net(), torch.randn(4), calls=2).functions if f.calls]
    assert names == ["Net.forward"]
