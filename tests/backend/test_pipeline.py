"""The pipeline: whatever a pass does, the user's graph computes what it did, and the report says what happened."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from optpass.backend import pipeline, snapshot
from optpass.backend.reporting import build_report
from optpass.errors import PassError
from optpass.options import Options
from optpass.passes import registry
from optpass.passes.contract import Pass, PassContext, PassResult, Stage
from optpass.reporting.model import Site

Run = Callable[[fx.GraphModule, PassContext], PassResult]
SITE = Site(kind="test", reason="because")


def make(run: Run, name: str = "tested", stage: Stage = Stage.DYNAMO, requires: tuple[str, ...] = ()) -> type[Pass]:
    class Made(Pass):
        summary = "made for a test"

        @classmethod
        def from_options(cls, options: Options) -> Pass:
            return cls()

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
            return run(gm, ctx)

    Made.name, Made.stage, Made.requires = name, stage, requires
    return Made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*passes: type[Pass]) -> None:
        monkeypatch.setattr(registry, "PASSES", passes)

    return put


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).t() + 1


def call(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the compiled and the eager function make of the same inputs; gradients too."""
    results = []
    inputs = [torch.randn(3, 4), torch.randn(4, 5)]
    for function in (torch.compile(f, backend="optpass", options={"inner": "aot_eager", **options}), f):
        own = [t.clone().requires_grad_() for t in inputs]
        out = function(*own)
        out.sum().backward()
        results.append(torch.cat([t.flatten() for t in (out.detach(), *(t.grad for t in own))]))
    return results[0], results[1]


def first(gm: fx.GraphModule, text: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if text in str(n.target) and n.op.startswith("call"))


def after_relu(gm: fx.GraphModule, method: str, *args: Any) -> None:
    relu = first(gm, "relu")
    with gm.graph.inserting_after(relu):
        new = gm.graph.call_method(method, (relu, *args))
    relu.replace_all_uses_with(new)
    new.args = (relu, *args)


def raises(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    after_relu(gm, "neg")
    gm.register_buffer("extra", torch.ones(2))
    gm.graph.erase_node(gm.graph.call_method("cos", (first(gm, "relu"),)))
    raise KeyError("no such thing")


def other_dtype(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    after_relu(gm, "double")
    return PassResult(applied=[SITE], changed=True)


def other_shape(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    after_relu(gm, "sum", 0, True)
    return PassResult(applied=[SITE], changed=True)


def other_stride(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    add = first(gm, "add")
    with gm.graph.inserting_after(add):
        new = gm.graph.call_method("contiguous", (add,))
    add.replace_all_uses_with(new)
    new.args = (add,)
    return PassResult(applied=[SITE], changed=True)


def cut_gradient(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    after_relu(gm, "detach")
    return PassResult(applied=[SITE], changed=True)


def malformed(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    add, relu = first(gm, "add"), first(gm, "relu")
    relu.args = (add,)  # a value before it is made
    return PassResult(applied=[SITE], changed=True)


def fewer_outputs(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((),)
    return PassResult(applied=[SITE], changed=True)


def more_inputs(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    gm.graph.placeholder("another")
    return PassResult(changed=True)


def unknown_op(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    after_relu(gm, "no_such_method")
    return PassResult(applied=[SITE], changed=True)


def silent_change(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    after_relu(gm, "neg")
    return PassResult()


def no_reason(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    return PassResult(declined=[Site.model_construct(kind="test", reason="  ", node="relu")])


def applied_nothing(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    return PassResult(applied=[SITE])


BAD: list[tuple[Run, str]] = [
    (raises, "KeyError: 'no such thing'"),
    (other_dtype, r"changed output 0 from float32\[.* to float64\["),
    (other_shape, r"changed output 0 from float32\[5, 3\] .* to float32\[5, 1\]"),
    (other_stride, r"changed output 0 from .* stride \(1, 5\).* to .* stride \(3, 1\)"),
    (cut_gradient, r"changed output 0 from .* requires_grad to "),
    (malformed, "left a malformed graph"),
    (fewer_outputs, "changed the number of outputs from 1 to 0"),
    (more_inputs, "changed the graph's inputs|left a malformed graph"),
    (unknown_op, "no_such_method.* does not run on fake tensors"),
    (silent_change, "changed the graph but says that it is unchanged"),
    (no_reason, "site at node 'relu' has no reason"),
    (applied_nothing, "reports applied sites but says that the graph is unchanged"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "message"), BAD, ids=[run.__name__ for run, _ in BAD])
def test_a_bad_pass_is_undone_and_reported(
    run: Run, message: str, install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[str] = []

    def watched(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        codes.append(gm.code)
        return run(gm, ctx)

    def after(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        codes.append(gm.code)
        assert not hasattr(gm, "extra")
        return PassResult()

    install(make(watched), make(after, "after"))
    with caplog.at_level(logging.WARNING, "optpass"):
        mine, theirs = call()
    torch.testing.assert_close(mine, theirs)
    assert codes[0] == codes[1]
    failed, good = build_report().graphs[0].passes
    assert failed.error and failed.applied == failed.declined == [] and good.error is None
    assert re.search(message, failed.error)
    assert any("was undone" in r.getMessage() and "tested" in r.getMessage() for r in caplog.records)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"pass 'tested' failed on graph \d+: ") as caught:
        call(strict=True)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), PassError)


@pytest.mark.parametrize("stage", [Stage.JOINT, Stage.COMPILED])
def test_failures_at_later_stages(stage: Stage, install: Any) -> None:
    def bad(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        if stage is Stage.JOINT:
            gm.graph.erase_node(next(n for n in reversed(gm.graph.nodes) if n.op == "output"))
        else:
            assert {a.phase for a in ctx.aten} == {"forward", "backward"}
        raise ValueError("late")

    install(make(bad, stage=stage))
    mine, theirs = call()
    torch.testing.assert_close(mine, theirs)
    (record,) = build_report().graphs[0].passes
    assert record.error == "ValueError: late" and record.stage == stage


def test_a_good_joint_pass_changes_what_runs(install: Any) -> None:
    def doubles(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        relu = first(gm, "relu")
        with gm.graph.inserting_after(relu):
            new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (relu, 2))
        relu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return PassResult(applied=[SITE], changed=True)

    install(make(doubles, stage=Stage.JOINT))
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with torch.no_grad():
        out = torch.compile(f, backend="optpass", options={"inner": "aot_eager", "strict": True})(x, w)
    torch.testing.assert_close(out, (torch.relu(x @ w) * 2).t() + 1)


def test_requirements(install: Any) -> None:
    def fine(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        return PassResult(product=1)

    def bad(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        raise RuntimeError("broken")

    install(
        make(fine, "last", stage=Stage.JOINT, requires=("fine",)),
        make(fine, "skipped", requires=("bad",)),
        make(fine, "skipped too", requires=("skipped",)),
        make(bad, "bad"),
        make(fine, "fine"),
    )
    call()
    errors = {p.name: p.error for p in build_report().graphs[0].passes}
    assert errors == {
        "fine": None,
        "last": None,
        "bad": "RuntimeError: broken",
        "skipped": "not run: it requires 'bad'",
        "skipped too": "not run: it requires 'skipped'",
    }
    torch._dynamo.reset()
    call(disable_passes=["bad", "fine"])
    errors = {p.name: p.error for p in build_report().graphs[1].passes}
    assert errors["skipped"] == "not run: it requires 'bad'" and errors["last"] == "not run: it requires 'fine'"


def test_time_and_sites_are_recorded(install: Any) -> None:
    import time

    def slow(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        time.sleep(0.05)
        after_relu(gm, "clone")
        return PassResult(applied=[SITE], declined=[SITE.model_copy(update={"reason": "not here"})], changed=True)

    install(make(slow))
    call(strict=True)
    report = build_report()
    (record,) = report.graphs[0].passes
    assert 0.05 <= record.seconds <= report.graphs[0].t_passes_s <= report.graphs[0].t_compile_s
    assert [s.reason for s in report.sites("test")] == ["because"]
    assert [s.reason for s in report.declined("test")] == ["not here"]


def test_new_nodes_get_fake_values_where_they_stand(install: Any) -> None:
    """In the grad mode and autocast that hold there, with no memory allocated and no guard added."""
    seen: dict[str, torch.Tensor] = {}

    def inserts(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        for node in [n for n in gm.graph.nodes if "linear" in str(n.target) and n.op == "call_function"]:
            with gm.graph.inserting_after(node):
                copied = gm.graph.call_function(node.target, node.args)
            node.replace_all_uses_with(copied)
            gm.graph.erase_node(node)
        with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op.startswith("call"))):
            gm.graph.call_function(torch.zeros, (10**14,))
        return PassResult(applied=[SITE], changed=True)

    def looks(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        seen.update({n.name: n.meta["example_value"] for n in gm.graph.nodes if "linear" in str(n.target)})
        zeros = first(gm, "zeros")
        seen["zeros"] = zeros.meta["example_value"]
        gm.graph.erase_node(zeros)
        return PassResult(changed=True)

    def g(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.linear(x, w)
        with torch.no_grad():
            b = torch.nn.functional.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            c = torch.nn.functional.linear(x, w)
        return a + b + c

    install(make(inserts), make(looks, "looks"))
    x, w = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    out = torch.compile(g, backend="optpass", options={"inner": "eager", "strict": True})(x, w)
    torch.testing.assert_close(out, g(x, w))
    assert seen.pop("zeros").shape == (10**14,)
    assert [(v.dtype, v.requires_grad) for v in seen.values()] == [
        (torch.float32, True), (torch.float32, False), (torch.bfloat16, True),
    ]  # fmt: skip


def test_the_check_adds_no_guard(install: Any) -> None:
    def inserts(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        relu = first(gm, "relu")
        with gm.graph.inserting_after(relu):
            added = gm.graph.call_function(torch.add, (relu, first(gm, "matmul")))
        with gm.graph.inserting_after(added):
            new = gm.graph.call_function(torch.sub, (added, first(gm, "matmul")))
        relu.replace_all_uses_with(new, delete_user_cb=lambda user: user.op == "call_method")
        return PassResult(applied=[SITE], changed=True)

    def count(*passes: type[Pass]) -> int:
        torch._dynamo.reset()
        graphs = 0

        def inner(gm: fx.GraphModule, _: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return gm.forward

        install(*passes)
        step = torch.compile(f, backend="optpass", dynamic=True, options={"inner": inner, "strict": True})
        for n in (3, 5, 7, 8, 16):
            step(torch.randn(n, n + 20), torch.randn(n + 20, 4))
        return graphs

    assert count(make(inserts)) == count() == 1


def test_a_symbol_that_guards_have_fixed_is_its_number() -> None:
    """A node that is evaluated again has the number; what was traced before the guard has the symbol still."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    x = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=True)).from_tensor(torch.randn(6, 7))
    rows, columns = x.shape
    assert isinstance(rows, torch.SymInt)
    assert not snapshot.same_metadata(rows, 6) and not snapshot.same_metadata(rows, columns)
    assert rows == 6  # the guard
    assert snapshot.same_metadata(rows, 6) and snapshot.same_metadata(6, rows)
    assert not snapshot.same_metadata(rows, 7)
    assert columns - 2 * ((columns + 2) // 3) == 1  # a guard on an expression
    assert snapshot.same_metadata(columns - 2 * ((columns + 2) // 3), 1)
    assert not snapshot.same_metadata(columns, 7)


def test_restoring_keeps_names_code_and_attributes() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.ones(2))
            self.child = torch.nn.Linear(2, 2)

        def forward(self, input: torch.Tensor, sum_1: torch.Tensor) -> Any:
            sum_2, list_ = input.sum(), sum_1.sum()
            return {"a": (sum_2 + list_, self.child(input) * self.p)}, slice(None, 2)

    gm = fx.symbolic_trace(Odd())
    code, nodes, parameter = gm.code, [n.name for n in gm.graph.nodes], gm.p
    graph = gm.graph
    before = snapshot.take(gm, "example_value")
    assert gm.graph is not graph and gm.code == code
    assert not snapshot.modified(gm, before)
    gm.p = torch.nn.Parameter(torch.zeros(2))
    assert snapshot.modified(gm, before)
    del gm.child
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "output":
            node.args = (None,)
        elif not node.users and node.op != "placeholder":
            gm.graph.erase_node(node)
    gm.recompile()
    snapshot.restore(gm, before)
    assert gm.graph is graph
    assert gm.code == code and [n.name for n in gm.graph.nodes] == nodes and gm.p is parameter
    assert gm(torch.ones(2, 2), torch.ones(2))[1] == slice(None, 2)


def test_run_stage_leaves_other_stages_alone() -> None:
    def never(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        raise AssertionError

    gm = fx.symbolic_trace(lambda x: x + 1)
    context = PassContext(Options(), lambda: None, "0", False)  # type: ignore[arg-type, return-value]
    assert pipeline.run_stage(Stage.DYNAMO, [make(never, stage=Stage.JOINT)()], gm, context, {}) == []


def test_an_operation_of_symbolic_sizes_runs_in_the_check() -> None:
    """`interpolate` takes no symbolic sizes by itself: it must be decomposed as Dynamo decomposes it."""

    def positions(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        grid = table.t().view(1, 4, 3, 3).to(table.dtype)  # which the redundant pass takes away
        return torch.nn.functional.interpolate(grid, size=x.shape[1:], mode="bicubic")

    torch._dynamo.reset()
    options = {"inner": lambda gm, _: gm.forward, "strict": True}
    compiled = torch.compile(positions, backend="optpass", dynamic=True, fullgraph=True, options=options)
    table = torch.randn(9, 4)
    for sizes in ((5, 7), (6, 8)):
        x = torch.randn(2, *sizes)
        torch.testing.assert_close(compiled(x, table), positions(x, table))


def test_sizes_are_compared_where_one_is_written_with_a_division() -> None:
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shape_env)
    x = torch.empty(6, 6)
    torch._dynamo.mark_dynamic(x, (0, 1))
    size = mode.from_tensor(x).shape[0]
    square = mode.from_tensor(torch.empty(1)).expand(size * size)
    again = mode.from_tensor(torch.empty(1)).expand(size * (size * size // size))
    other = mode.from_tensor(torch.empty(1)).expand(size * (size * size // (size + 1)))
    assert snapshot.same_metadata(square, again)
    assert not snapshot.same_metadata(square, other)
