"""How many operations of a call ran in graphs: also of a call that compiles, and without being in the program's way."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from optpass.backend.audit import observe
from optpass.backend.audit.observe import OBSERVER
from optpass.backend.audit.recording import Recording
from optpass.backend.compat.audit_operations import OperationLog
from optpass.reporting.audit.model import Audit

Program = Callable[[str], ModuleType]
Record = Callable[..., Audit]

BROKEN = "def f(x):\n    y = x + 1\n    print('a')\n    return y * 2\n"
KINDS = """
    @torch._dynamo.disable
    def outside(x):
        return x.exp().log()

    def helper(x):
        return x.cos() + 1

    def loop(x):
        for i in range(2):
            print(i)
            x = helper(x) * 2
        return x

    def call(x):
        return outside(x + 1) * 2

    def twice(x):
        y = outside(x + 1) * 2
        return outside(y) * 3

    def skipped(x):
        try:
            return [x.sin(), x.cos()][int(x.sum().item() > 0)]
        finally:
            print()

    inner = torch.compile(call, backend="eager")

    @torch._dynamo.disable
    def nested(x):
        return inner(x).exp()

    def outer(x):
        return nested(x + 1) * 3

    class Hooked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.linear.register_forward_hook(lambda module, given, made: outside(made))

        def forward(self, x):
            return self.linear(x).relu()

    def generator(x):
        return sum(part * 2 for part in outside(x).split(1))

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return outside(x) * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def custom(x):
        return Custom.apply(x + 1) + 1
"""
#: Operations in graphs and all operations of one call, counted by hand.
COUNTS = {
    "loop": (4, 6), "call": (2, 4), "twice": (3, 7), "skipped": (0, 4), "outer": (4, 7),
    "Hooked": (None, 4),  # torch 2.11 does not go on behind a break in a hook
    "generator": (13, 15), "custom": (3, 5),
}  # fmt: skip


def counts(audit: Audit, name: str) -> tuple[int, int | None]:
    (function,) = (f for f in audit.functions if f.calls and f.function.startswith(name))
    return function.ops_captured, function.ops_total


def test_share_of_operations_in_graphs(program: Program, record: Record) -> None:
    module = program("""
        def helper(x):
            return x.cos() + 1

        def f(x):
            for i in range(2):
                print(i)
                x = helper(x) * 2
            return x

        def g(x):
            y = x.sin() + 1
            print("g")
            return y * 2
    """)
    f = {record.function: record for record in record(module.f, torch.randn(4), calls=6).functions}
    assert (f["f"].ops_captured, f["f"].ops_total) == (4, 6)  # two calls of helper, and two products outside of it
    audit = record(module.g, torch.randn(4), calls=6)
    assert audit.summary.ops_captured_fraction == 1.0


def test_observing_leaves_the_program_alone(program: Program, record: Record) -> None:
    module = program(BROKEN)
    before = dict(vars(module))
    audit = record(module.f, torch.randn(4), calls=6)
    assert audit.functions[0].ops_total == 2
    graphs = {name: value for name, value in vars(module).items() if name.startswith("__compiled_fn")}
    assert len(graphs) == 2
    assert not any("optpass" in getattr(v, "__qualname__", "") for v in graphs.values())
    assert all(vars(module)[name] is value for name, value in before.items())


def test_an_active_profiler_is_not_disturbed(program: Program) -> None:
    module = program(BROKEN)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(5):
                compiled(torch.randn(4))
    assert any("aten::add" in event.key for event in profile.key_averages())
    assert recording.result().functions[0].ops_total is None


@pytest.mark.parametrize("name", COUNTS)
def test_one_call_that_compiles_counts_as_later_ones(name: str, program: Program, record: Record) -> None:
    made = getattr(program(KINDS), name)
    function = made() if isinstance(made, type) else made
    captured, total = COUNTS[name]
    for calls in (1, 6):
        audit = record(function, torch.ones(4, 4), calls=calls, dynamic=False)
        found = counts(audit, name)
        assert found == (found[0] if captured is None else captured, total), calls
        captured = found[0]
        assert audit.summary.ops_captured_fraction is not None


def test_what_is_wrapped_for_a_graph_is_no_operation_of_the_program(program: Program) -> None:
    """A Python number that changes becomes an input of the graph: a tensor is made of it in each call."""
    module = program("""
        @torch._dynamo.disable
        def outside(x):
            return x.exp()

        def f(x, n):
            y = outside(x) * n
            return outside(y)
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        for n in (0.5, 1.5, 2.5, 3.5):
            compiled(torch.ones(4), n)
    (record,) = (f for f in recording.result().functions if f.calls and f.function == "f")
    assert record.ops_captured
    assert record.ops_total == record.ops_captured + 2


def test_calls_that_all_compile(program: Program) -> None:
    module = program(KINDS)
    with Recording() as recording:
        compiled = torch.compile(module.call, backend="eager", dynamic=False)
        for n in (2, 3, 4):
            compiled(torch.ones(n))
    assert counts(recording.result(), "call") == (2, 4)


def test_a_recompile_that_breaks_is_counted(program: Program) -> None:
    """The call before broke nowhere, and no other follows."""
    module = program("""
        def f(x, loud):
            y = x.sin() + 1
            if loud:
                torch._dynamo.graph_break()
                y = torch._dynamo.disable(torch.exp)(y)
            return y * 2
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        compiled(torch.ones(4), False)
        compiled(torch.ones(4), True)
    assert counts(recording.result(), "f") == (3, 4)


def test_a_call_that_raises_is_not_counted(program: Program) -> None:
    module = program("""
        def f(x):
            y = x + 1
            print("a")
            y = y * 2
            raise ValueError
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        for _ in range(3):
            with pytest.raises(ValueError):
                compiled(torch.ones(4))
            audit = recording.result()
            assert audit.functions[0].ops_total is None and audit.summary.ops_captured_fraction is None


def test_a_call_inside_of_a_handler_is_counted(program: Program) -> None:
    module = program(KINDS)
    with Recording() as recording:
        compiled = torch.compile(module.call, backend="eager")
        try:
            raise KeyError
        except KeyError:
            compiled(torch.ones(4))
    assert counts(recording.result(), "call") == (2, 4)


@pytest.mark.parametrize("made", ["torch.profiler.profile", "torch.autograd.profiler.profile", "legacy.profile"])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_profiler_that_the_program_starts_inside_goes_first(calls: int, made: str, program: Program) -> None:
    """It could not start beside ours: the program would fail where it does not without an audit."""
    module = program(f"""
        from torch.autograd import profiler_legacy as legacy
        seen = []

        @torch._dynamo.disable
        def measured(x):
            with {made}() as profile:
                y = x.sin().cos()
            seen.append({{event.name for event in profile.function_events or ()}} if {made!r} == "legacy.profile"
                        else {{event.key for event in profile.key_averages()}})
            return y

        def f(x):
            return measured(x + 1) * 2
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        for _ in range(calls):
            compiled(torch.ones(4))
    assert len(module.seen) == calls and all({"aten::sin", "aten::cos"} <= seen for seen in module.seen)
    assert recording.result().functions[0].ops_total is None
    assert not torch.autograd._profiler_enabled()


def test_what_is_patched_for_a_call_is_put_back(program: Program, record: Record) -> None:
    before = dict(vars(torch.autograd.profiler))
    record(program(KINDS).call, torch.ones(4), calls=3)
    assert dict(vars(torch.autograd.profiler)) == before
    assert OBSERVER._current is None


def test_healthy_functions_are_not_profiled(program: Program, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(observe, "Observation", lambda: started.append(1))
    audit = record(program("def f(x):\n    return x + 1\n").f, torch.ones(4), calls=3)
    assert not started and audit.summary.ops_captured_fraction == 1.0


def test_a_call_inside_of_an_operation_is_part_of_it(program: Program) -> None:
    """For the call around it; by itself it is counted as any other."""
    module = program("""
        def inside(x):
            print("in")
            return x.exp()

        library = torch.library.Library("optpass_test_observe", "DEF")
        library.define("op(Tensor x) -> Tensor")
        compiled = torch.compile(inside, backend="eager")
        library.impl("op", lambda x: compiled(x).log(), "CompositeExplicitAutograd")

        @torch._dynamo.disable
        def outside(x):
            return torch.ops.optpass_test_observe.op(x)

        def f(x):
            return outside(x + 1) * 2
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        for calls in (1, 4):
            for _ in range(calls):
                compiled(torch.ones(4))
            assert counts(recording.result(), "f") == (2, 3), calls
            assert counts(recording.result(), "inside") == (1, 1), calls


def test_a_compile_during_a_backward_leaves_no_profiler_behind(program: Program) -> None:
    """The engine puts back what a thread had when the backward began, and with it a profiler that was stopped since."""
    module = program("""
        def inside(grad):
            print("in")
            return grad * 2

        compiled = torch.compile(inside, backend="eager")

        def f(x):
            print("f")
            y = x.sin()
            y.register_hook(compiled)
            y.sum().backward()
            return x.grad * 2
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        for _ in range(3):
            compiled(torch.ones(4, requires_grad=True))
            assert not torch.autograd._profiler_enabled()
    assert recording.result().functions


def test_nothing_is_logged_while_a_backward_is_compiled(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled where it is first run, inside of the call; and the program may forget all callbacks behind it."""
    module = program("""
        @torch._dynamo.disable
        def after():
            forget()

        def f(x):
            y = x.sin() * 2
            y.sum().backward()
            after()
            return x.grad * 2
    """)
    logged: list[int] = []
    stop = OperationLog.stop

    def counted(log: OperationLog) -> object:
        events = stop(log)
        logged.append(sum(map(len, events or ())))
        return events

    monkeypatch.setattr(OperationLog, "stop", counted)

    def compile_backward(graph: torch.fx.GraphModule, inputs: object) -> object:
        for _ in range(1000):
            torch.ones(3).add_(1)
        return make_boxed_func(graph)

    for forget in (lambda: None, torch._dynamo.reset):
        module.forget = forget  # type: ignore[attr-defined]
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=compile_backward)
        with Recording() as recording:
            torch.compile(module.f, backend=backend)(torch.ones(4, requires_grad=True))
        assert not torch.autograd._profiler_enabled()
        assert recording.result().functions
    assert counts(recording.result(), "f") == (4, 5)  # the gradient to begin with is made by torch
    assert 0 < max(logged) < 2000  # 16,000 with the compile


def test_of_a_call_that_is_a_whole_training_little_is_kept(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_MANY", 2)
    monkeypatch.setattr(observe, "_MOST", 5)
    kept: list[int] = []
    stop = OperationLog.stop

    def counted(log: OperationLog) -> object:
        threads = stop(log)
        kept.append(sum(map(len, threads or [])))
        return threads

    monkeypatch.setattr(OperationLog, "stop", counted)
    module = program("""
        def step(x):
            return x.sin() + 1

        def f(x, steps):
            for i in range(steps):
                print(i)
                x = step(x) * 2
            return x
    """)
    with Recording() as recording:
        compiled = torch.compile(module.f, backend="eager")
        for steps in (4, 400, 400):
            compiled(torch.ones(4), steps)
    assert len(kept) == 2 and kept[1] < 3 * kept[0]  # and the third call is not looked at
    (f,) = (r for r in recording.result().functions if r.function == "f")
    assert (f.ops_captured, f.ops_total) == (8, 12)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sin()
    assert any(event.key == "aten::sin" for event in profile.key_averages())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_inside_of_a_call_is_not_profiled(program: Program) -> None:
    module = program("""
        import os

        @torch._dynamo.disable
        def forks(x):
            pid = os.fork()
            if pid == 0:
                os._exit(3 if torch.autograd._profiler_enabled() else 0)
            status.append(os.waitpid(pid, 0)[1])
            return x.exp()

        status = []

        def f(x):
            return forks(x + 1) * 2
    """)
    with Recording() as recording:
        torch.compile(module.f, backend="eager")(torch.ones(4))
    assert module.status == [0]
    assert counts(recording.result(), "f") == (2, 3)
