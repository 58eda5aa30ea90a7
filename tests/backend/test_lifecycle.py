"""Over time: several models, resets, copies and files, threads, and what is kept alive."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optpass.backend.reporting import build_report, reset_report
from optpass.backend.session import SESSIONS

EAGER = {"inner": "eager"}


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def net(width: int = 6) -> nn.Module:
    return Net(width)


def test_several_models_in_one_process() -> None:
    models = [net(4), net(5), nn.Conv2d(1, 2, 3)]
    inputs = [torch.randn(2, 4), torch.randn(2, 5), torch.randn(1, 1, 5, 5)]
    options: list[dict[str, Any]] = [EAGER, {"inner": "aot_eager"}, {"inner": "eager", "disable_passes": ["roofline"]}]
    steps = [torch.compile(m, backend="optpass", options=o) for m, o in zip(models, options, strict=True)]
    for _ in range(2):
        for model, step, x in zip(models, steps, inputs, strict=True):
            torch.testing.assert_close(step(x), model(x))
    report = build_report()
    assert [g.inner for g in report.graphs] == ["eager", "aot_eager", "eager"]
    assert len({g.id for g in report.graphs}) == 3 and [g.calls for g in report.graphs] == [2, 2, 2]


def test_the_same_code_with_other_options_compiles_again() -> None:
    model, x = net(), torch.randn(2, 6)
    for options in (EAGER, EAGER, {"inner": "aot_eager"}, EAGER):
        torch.compile(model, backend="optpass", options=dict(options))(x)
    assert [g.inner for g in build_report().graphs] == ["eager", "aot_eager"]


def test_reset_and_again() -> None:
    model, x = net(), torch.randn(2, 6)
    step = torch.compile(model, backend="optpass", options=EAGER)
    step(x)
    torch._dynamo.reset()
    torch._dynamo.reset()
    torch.testing.assert_close(step(x), model(x))
    assert len(build_report().graphs) == 2  # what was compiled before the reset was compiled
    reset_report()
    torch.testing.assert_close(step(x), model(x))
    assert build_report().graphs == []
    torch._dynamo.reset()
    step(x)
    (graph,) = build_report().graphs
    assert graph.id == "2" or int(graph.id) > 1


def test_state_dict_save_and_copies(tmp_path: Path) -> None:
    model, x = net(), torch.randn(2, 6)
    step = torch.compile(model, backend="optpass", options=EAGER)
    expected = step(x)
    assert {k.removeprefix("_orig_mod.") for k in step.state_dict()} == set(model.state_dict())
    other = torch.compile(net(), backend="optpass", options=EAGER)
    other.load_state_dict(step.state_dict())
    torch.testing.assert_close(other(x), expected)
    torch.save(step.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    buffer = io.BytesIO()
    torch.save(step, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), expected)
    copied = copy.deepcopy(step)
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    torch.testing.assert_close(copied(x), expected)
    model.compile(backend="optpass", options=EAGER)
    torch.testing.assert_close(model(x), step(x))


@pytest.mark.slow
def test_threads() -> None:
    """Eight threads compile and train different models at once, while another one asks for reports."""
    torch._dynamo.backends.registry.lookup_backend("optpass")  # torch loads an entry point once only, and unlocked
    errors: list[BaseException] = []
    start, done = threading.Barrier(9), threading.Event()

    def work(index: int) -> None:
        try:
            torch.manual_seed(index)
            mine = net(4 + index)
            theirs = copy.deepcopy(mine)
            step = torch.compile(mine, backend="optpass", options={"inner": "aot_eager", "strict": True})
            start.wait()
            for _ in range(3):
                x = torch.randn(3, 4 + index)
                step(x.t().t()).square().sum().backward()
                theirs(x).square().sum().backward()
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        except BaseException as error:  # noqa: BLE001  # told to the main thread
            errors.append(error)

    def watch() -> None:
        try:
            start.wait()
            while not done.is_set():
                build_report()
                done.wait(0.05)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join(240)
    done.set()
    watcher.join(60)
    assert errors == []
    report = build_report()
    assert len(report.graphs) == 8 == len({g.id for g in report.graphs})
    assert all(g.calls == 3 and g.training and g.totals.flops > 0 for g in report.graphs)


def owner_of(inner: str | Callable[..., Any]) -> tuple[list[weakref.ref[Any]], weakref.ref[Any]]:
    """Compile and run a model with a parameter, a buffer and a constant; weak references to what is the user's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))
            self.register_buffer("offset", torch.randn(5))
            self.plain = torch.randn(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.t().t() + self.offset) * self.plain + torch.tensor([1.0, 2, 3, 4, 5])

    model, x = Model(), torch.randn(3, 5)
    step = torch.compile(model, backend="optpass", options={"inner": inner})
    step(x).sum().backward()
    assert model.weight.grad is not None
    kept = [model.weight, model.offset, model.plain, x, model.weight.grad]
    return [weakref.ref(t) for t in kept], weakref.ref(model)


def capture_only(gm: Any, inputs: Any) -> Callable[..., Any]:
    return gm.forward  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "reported"),
    [
        ("eager", False),
        ("eager", True),
        ("aot_eager", False),
        (capture_only, False),
        (capture_only, True),
        ("inductor", True),
    ],
)
def test_nothing_of_the_users_is_kept_alive(inner: Any, reported: bool) -> None:
    tensors, model = owner_of(inner)
    if reported:
        assert build_report().graphs[0].totals.flops > 0
    assert len(SESSIONS.all()) == 1
    torch._dynamo.reset()
    gc.collect()
    assert model() is None
    assert [ref() for ref in tensors] == [None] * len(tensors)
    assert build_report().graphs[0].totals.flops > 0  # still known, from fake tensors


def test_constants_are_not_kept_alive() -> None:
    """Attributes of the graph itself, where Dynamo does not lift them to inputs."""
    refs = []

    def build() -> None:
        linear = nn.Linear(4, 4)
        refs.extend(weakref.ref(p) for p in linear.parameters())
        with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
            torch.compile(linear, backend="optpass", options=EAGER)(torch.randn(2, 4))

    build()
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert build_report().graphs[0].totals.flops > 0


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path, harness: Any) -> None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch is built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = net()
        theirs = copy.deepcopy(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        step = torch.compile(parallel, backend="optpass", options={"inner": "aot_eager"})
        x = torch.randn(3, 6)
        a, b = harness.run(model, [x], step), harness.run(theirs, [x])
        torch.testing.assert_close(a.grads, b.grads)
        assert build_report().graphs
    finally:
        dist.destroy_process_group()
