"""Rewrites that rest on what a buffer holds are never kept once it holds something else."""

from __future__ import annotations

import gc
import logging
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from optpass.backend import content_guard
from optpass.backend.held import Held
from optpass.backend.reporting import build_report
from optpass.options import Options
from optpass.passes import registry
from optpass.passes.contract import ContentGuard, Pass, PassContext, PassResult, Stage
from optpass.reporting.model import Site


class Ones(Pass):
    """x * ones as x: right only while they are ones."""

    name, summary, stage = "ones", "made for a test", Stage.DYNAMO

    @classmethod
    def from_options(cls, options: Options) -> Pass:
        return cls()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        result = PassResult()
        for node in [n for n in gm.graph.nodes if n.target is operator.mul and isinstance(n.args[1], fx.Node)]:
            x, factor = node.args
            held = ctx.contents(factor)
            site = Site(kind=self.name, node=node.name, reason="multiplies by ones")
            if held is None or not bool((held == 1).all()):
                result.declined.append(site.model_copy(update={"reason": "unknown" if held is None else "no ones"}))
                continue
            node.replace_all_uses_with(x)
            gm.graph.erase_node(node)
            result.applied.append(site)
            result.guards.append(ContentGuard(factor, "all ones"))
        result.changed = bool(result.applied)
        return result


@pytest.fixture(autouse=True)
def only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PASSES", (Ones,))


class Masked(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("mask", torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.mask


OPTIONS: dict[str, Any] = {"inner": "aot_eager", "strict": True}


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="optpass", options=OPTIONS | options)


def reasons(graph: int = 0) -> tuple[list[str], list[str]]:
    """Of sites applied and declined in a graph."""
    (record,) = build_report().graphs[graph].passes
    return [s.reason for s in record.applied], [s.reason for s in record.declined]


def check(step: Callable[..., Any], model: Callable[..., Any], *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(step(*inputs), model(*inputs))


# ---- what is watched ----------------------------------------------------------------------------------------------


def fill(model: Masked) -> None:
    model.mask.fill_(2)


def fill_no_grad(model: Masked) -> None:
    with torch.no_grad():
        model.mask[0] = 0.0


def fill_inference(model: Masked) -> None:
    with torch.inference_mode():
        model.mask.mul_(3)


def fill_view(model: Masked) -> None:
    model.mask[1:].zero_()


def fill_detached(model: Masked) -> None:
    model.mask.detach().fill_(5)


def assign_data(model: Masked) -> None:
    model.mask.data = torch.full((4,), 2.0)


def assign_data_at_the_same_address(model: Masked) -> None:
    address = model.mask.data_ptr()
    model.mask.data = torch.empty(0)
    tries = []
    while True:
        tries.append(torch.full((4,), 2.0))
        if tries[-1].data_ptr() == address or len(tries) > 1000:
            break
    model.mask.data = tries[-1]


def assign_data_inferred(model: Masked) -> None:
    with torch.inference_mode():
        model.mask.data = torch.full((4,), 2.0)


def replace(model: Masked) -> None:
    model.mask = torch.full((4,), 2.0)


def replace_inferred(model: Masked) -> None:
    with torch.inference_mode():
        model.mask = torch.full((4,), 2.0)


def replace_by_its_data(model: Masked) -> None:
    """An alias with a count of writes of its own, which ends where the other's was."""
    model.mask = model.mask.data
    model.mask.fill_(2)


def load(model: Masked) -> None:
    model.load_state_dict(model.state_dict() | {"mask": torch.full((4,), 2.0)})


def load_assigned(model: Masked) -> None:
    model.load_state_dict(model.state_dict() | {"mask": torch.full((4,), 2.0)}, assign=True)


def swap(model: Masked) -> None:
    torch.utils.swap_tensors(model.mask, torch.full((4,), 2.0))


def resize(model: Masked) -> None:
    model.mask.set_(torch.full((4,), 2.0))


def fill_nan(model: Masked) -> None:
    model.mask.fill_(float("nan"))


CHANGES = [
    fill, fill_no_grad, fill_inference, fill_view, fill_detached, assign_data, assign_data_at_the_same_address,
    assign_data_inferred, replace, replace_inferred, replace_by_its_data, load, load_assigned, swap, resize,
    fill_nan,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[c.__name__ for c in CHANGES])
def test_changes_are_found(change: Callable[[Masked], None], fresh: torch.Generator) -> None:
    model = Masked()
    step = compiled(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(3):
            check(step, model, x)
        change(model)
        for _ in range(3):
            torch.testing.assert_close(step(x), model(x), equal_nan=True)
    assert reasons() == (["multiplies by ones"], [])
    assert not torch.equal(model.mask, torch.ones(4))


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    outer = nn.Sequential(nn.Linear(4, 4), Masked())
    step, x = compiled(outer), torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, "optpass"):
        check(step, outer, x)
        assert build_report().warnings == []
        for value in (2.0, 3.0):
            outer[1].mask.fill_(value)
            for _ in range(2):
                check(step, outer, x)
    (warning,) = build_report().warnings
    graphs = build_report().graphs
    assert f"graph {graphs[0].id}:" in warning and "1.mask" in warning and "all ones" in warning
    assert sum("1.mask" in record.getMessage() for record in caplog.records) == 1
    assert len(graphs) == 2, "the version without is compiled once"
    assert graphs[1].function.endswith("(test_content_guards.py:" + graphs[0].function.rpartition(":")[2])
    assert reasons(1) == ([], ["unknown"])


def test_the_fast_version_comes_back() -> None:
    ran: list[str] = []

    def inner(gm: fx.GraphModule, _: Any) -> Any:
        kind = "slow" if any(n.target is operator.mul for n in gm.graph.nodes) else "fast"

        def run(*args: Any) -> Any:
            ran.append(kind)
            return gm.forward(*args)

        return run

    model, x = Masked(), torch.randn(2, 4)
    step = compiled(model, inner=inner)
    for value in (1.0, 2.0, 1.0, 1.0):
        model.mask.fill_(value)
        check(step, model, x)
    model.load_state_dict(model.state_dict())
    check(step, model, x)
    assert ran == ["fast", "slow", "fast", "fast", "fast"]


def test_nothing_is_compared_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = Held.same
    monkeypatch.setattr(Held, "same", lambda *a: compared.append(1) or real(*a))
    model, x = Masked(), torch.randn(2, 4)
    step = compiled(model)
    for i in range(3 * content_guard.MAX_CHANGES):
        model.mask.fill_(float(i + 2))
        check(step, model, x)
    assert len(compared) <= content_guard.MAX_CHANGES + 2
    model.mask.fill_(1)
    check(step, model, x)


def test_unchanged_contents_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_guard, "MIN_PERIOD", 1 << 30)
    monkeypatch.setattr(content_guard, "ALWAYS_BYTES", -1)
    compared: list[int] = []
    real = Held.same
    monkeypatch.setattr(Held, "same", lambda *a: compared.append(1) or real(*a))
    model, x = Masked(), torch.randn(2, 4)
    step = compiled(model)
    for _ in range(20):
        check(step, model, x)
    assert len(compared) == 1
    model.mask.fill_(1)
    for _ in range(20):
        check(step, model, x)
    assert len(compared) == 2


@pytest.mark.parametrize("write", [lambda t: t.data.fill_(2), lambda t: t.numpy().fill(2)], ids=["data", "numpy"])
def test_uncounted_writes_to_small_tensors_are_found(write: Callable[[torch.Tensor], Any]) -> None:
    model, x = Masked(), torch.randn(2, 4)
    step = compiled(model)
    check(step, model, x)
    write(model.mask)
    check(step, model, x)


@pytest.mark.parametrize("write", [lambda t: t.data.fill_(2), lambda t: t.numpy().fill(2)], ids=["data", "numpy"])
def test_uncounted_writes_are_found_late(write: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_guard, "ALWAYS_BYTES", -1)
    model, x = Masked(), torch.randn(2, 4)
    step = compiled(model)
    check(step, model, x)
    write(model.mask)
    for _ in range(content_guard.MIN_PERIOD):
        out = step(x)
    for _ in range(3):
        out = step(x)
    torch.testing.assert_close(out, model(x))


def test_writes_while_the_graph_is_compiled_are_found() -> None:
    model, x = Masked(), torch.randn(2, 4)

    def inner(gm: fx.GraphModule, _: Any) -> Any:
        model.mask.data.fill_(2)
        return gm.forward

    check(compiled(model, inner=inner), model, x)


def test_layers_that_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame, compiled once, with the buffers of each layer in turn."""
    monkeypatch.setattr(content_guard, "MIN_PERIOD", 1 << 30)
    monkeypatch.setattr(content_guard, "ALWAYS_BYTES", -1)
    compared: list[int] = []
    real = Held.same
    monkeypatch.setattr(Held, "same", lambda *a: compared.append(1) or real(*a))
    layers = [Masked() for _ in range(5)]
    for layer in layers:
        layer.compile(backend="optpass", options=OPTIONS)
    x = torch.randn(2, 4)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        y = z = x
        for layer in layers:
            y, z = layer(y), layer.forward(z)
        return y, z

    for _ in range(4):
        torch.testing.assert_close(*both())
    graphs = len(build_report().graphs)
    assert len(compared) <= 5, "each buffer once"
    layers[3].mask.fill_(2)
    for _ in range(4):
        torch.testing.assert_close(*both())
    assert len(build_report().graphs) == graphs + 1


def test_buffers_of_the_graph_itself() -> None:
    """Dynamo's other way of lending a module's tensors: as attributes of the graph."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
        model, x = Masked(), torch.randn(2, 4)
        step = compiled(model)
        check(step, model, x)
        assert reasons() == (["multiplies by ones"], [])
        model.mask.fill_(2)
        check(step, model, x)


# ---- how it is used -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_training(inner: str, harness: Any, fresh: torch.Generator) -> None:
    model, x = Masked(), torch.randn(3, 4, requires_grad=True)
    step = compiled(model, inner=inner)
    for value in (1.0, 2.0, 1.0):
        model.mask.fill_(value)
        ours, eager = harness.run(model, [x], step), harness.run(model, [x])
        harness.assert_no_less_exact(harness.in_double(model, [x]), ours, eager)
    assert len(build_report().graphs) == 2


def test_sizes_that_change() -> None:
    model = Masked()
    step = torch.compile(model, backend="optpass", dynamic=True, options=OPTIONS)
    check(step, model, torch.randn(3, 4))
    model.mask.fill_(2)
    for n in (3, 5, 8, 13):
        check(step, model, torch.randn(n, 4))
    applied = [reasons(i)[0] for i in range(len(build_report().graphs))]
    assert applied[0] and not any(applied[1:])


def test_several_graphs_in_several_states() -> None:
    model = Masked()
    first, second = Masked(), Masked()

    def function(x: torch.Tensor) -> torch.Tensor:
        x = first(x) + 1
        torch._dynamo.graph_break()
        with torch.autocast("cpu", torch.bfloat16):
            return second(x).float() * 3

    step, x = compiled(function), torch.randn(2, 4)
    check(step, function, x)
    second.mask.fill_(2)
    check(step, function, x)
    first.mask.fill_(0.5)
    check(step, function, x)
    with torch.no_grad():
        check(step, function, x)
    assert len(build_report().warnings) >= 2
    del model


def test_many_graphs_fall_back() -> None:
    """More than Dynamo recompiles one function for."""
    import torch._dynamo.config

    models = [Masked(size) for size in range(2, 12)]
    steps = [compiled(model, inner="eager") for model in models]
    inputs = [torch.randn(2, size) for size in range(2, 12)]
    with torch._dynamo.config.patch(recompile_limit=100, automatic_dynamic_shapes=False):
        for step, model, x in zip(steps, models, inputs, strict=True):
            check(step, model, x)
    for step, model, x in zip(steps, models, inputs, strict=True):
        model.mask.fill_(2)
        check(step, model, x)
    assert len(build_report().graphs) == 2 * len(models)


def test_a_mutated_input_is_mutated_once() -> None:
    class Counts(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            x.add_(1)
            return super().forward(x)

    model, x = Counts(), torch.zeros(2, 4)
    step = compiled(model)
    for value in (1.0, 2.0, 2.0, 1.0):
        model.mask.fill_(value)
        step(x)
    assert model.calls.item() == 4 and torch.equal(x, torch.full((2, 4), 4.0))


def test_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached graph is guarded like a new one, and one made for ones is never found for twos."""
    from torch._inductor.utils import fresh_cache

    model, x = Masked(), torch.randn(2, 4)
    outcomes = []
    with fresh_cache(), torch.no_grad():
        for value in (1.0, 1.0, 2.0, 2.0, 1.0):
            torch._dynamo.reset()
            model.mask.fill_(value)
            step = compiled(model, inner="inductor")
            check(step, model, x)
            outcomes.append(build_report().graphs[-1].cache)
            model.mask.fill_(3)
            check(step, model, x)
    assert outcomes[0] == "miss" and outcomes[1] == outcomes[4] == "hit"


def test_threads() -> None:
    model, x = Masked(), torch.randn(2, 4)
    step = compiled(model)
    check(step, model, x)
    wrong: list[Any] = []
    expected = {value: model.linear(x) * value for value in (1.0, 2.0)}

    def run() -> None:
        for _ in range(50):
            out = step(x)
            if not torch.allclose(out, expected[value]):
                wrong.append(out)

    for value in (1.0, 2.0, 1.0):
        model.mask.fill_(value)
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_nothing_of_the_users_is_kept() -> None:
    model = Masked()
    compiled(model)(torch.randn(2, 4))
    model.mask.fill_(2)
    memory = weakref.ref(model.mask.untyped_storage())
    replaced = model.mask
    model.mask = torch.ones(4)
    del replaced
    gc.collect()
    assert memory() is None
