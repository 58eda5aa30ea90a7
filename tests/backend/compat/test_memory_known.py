"""What Inductor generated is remembered where it would generate the same again, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import optpass
from optpass.backend.compat import memory, memory_known
from optpass.backend.memory.partition.order import least_peak
from optpass.backend.memory.replay.graph_values import values_of_inputs
from optpass.errors import BudgetInfeasibleError


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    memory_known.forget()
    yield
    memory_known.forget()


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each graph that Inductor generates code for."""
    found: list[int] = []
    codegen = GraphLowering.codegen

    def counted(graph: GraphLowering) -> Any:
        found.append(1)
        return codegen(graph)

    monkeypatch.setattr(GraphLowering, "codegen", counted)
    return found


def product(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [torch.mm(a, b).sin() + a]


def lowered(program: Callable[..., Any] = product, size: int = 8, offset: int = 0, **how: Any) -> memory.Lowered:
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(size * size + offset)[offset:].view(size, size) for _ in range(2)]
        graph = make_fx(program)(*inputs)
    return memory.lower(graph, values_of_inputs(graph), **{"is_backward": False, **how})


def test_the_same_graph_is_lowered_once(generated: list[int]) -> None:
    first, second = lowered(), lowered()
    assert len(generated) == 1
    assert second.source == first.source and first.work and first.work.graph is not None
    assert second.work is not None and second.work.graph is None and second.work.key == first.work.key
    memory_known.forget()
    assert lowered().source == first.source and len(generated) == 2


class Scaled(nn.Module):
    """Its graph holds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.ones(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a @ b * self.by]


def other(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [torch.mm(a, b).cos() + a]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES = {
    "program": (contextlib.nullcontext, {"program": other}),
    "size": (contextlib.nullcontext, {"size": 16}),
    "offset": (contextlib.nullcontext, {"offset": 1}),
    "half": (contextlib.nullcontext, {"is_backward": True}),
    "order": (contextlib.nullcontext, {"improve": least_peak}),
    "setting": (contextlib.nullcontext, {"settings": {"layout_optimization": not inductor.layout_optimization}}),
    "inductor": (lambda: inductor.patch(max_fusion_size=2), {}),
    "torch": (deterministic, {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_is_lowered(change: str, generated: list[int]) -> None:
    lowered()
    within, how = CHANGES[change]
    with within():
        lowered(**how)  # type: ignore[arg-type]
    assert len(generated) == 2


def test_what_a_graph_does_not_say_is_lowered_each_time(generated: list[int]) -> None:
    for passes in (None, lambda graph: None):
        with inductor.patch(post_grad_custom_pre_pass=passes):
            for _ in range(2):
                lowered(Scaled() if passes is None else product)
    assert len(generated) == 4


def test_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch, generated: list[int]) -> None:
    monkeypatch.setattr(memory_known, "MOST", 1)
    for size in (8, 16, 16, 8):
        lowered(size=size)
    assert len(generated) == 3


@pytest.mark.slow
def test_the_budget_that_a_refusal_names_is_lowered_once(generated: list[int]) -> None:
    """Its plan was looked at before, and comes out as it does where nothing is remembered."""
    net = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.GELU())))
    x = torch.randn(256, 32)

    def step(budget: int) -> tuple[int, float, list[torch.Tensor]]:
        """Graphs that were generated, the predicted peak, and the gradients."""
        torch.compiler.reset()
        optpass.reset_report()
        net.zero_grad()
        before = len(generated)
        options = {"memory_budget": budget, "optimizer": "none", "strict": True}
        with inductor.patch(force_disable_caches=True, fallback_by_default=True):  # no kernels
            torch.compile(lambda x: net(x).square().mean(), backend="optpass", options=options)(x).backward()
        (peak,) = (s.cost["predicted_peak_bytes"] for s in optpass.report().sites() if s.kind == "memory budget")
        return len(generated) - before, peak, [p.grad.clone() for p in net.parameters() if p.grad is not None]

    with pytest.raises(BudgetInfeasibleError) as refused:
        step(1)
    assert len(generated) > 2
    remembered = step(refused.value.floor_bytes)
    assert remembered[0] == 2
    memory_known.forget()
    afresh = step(refused.value.floor_bytes)
    assert remembered[1] == afresh[1] <= refused.value.floor_bytes
    assert all(map(torch.equal, remembered[2], afresh[2]))


def test_graphs_of_symbolic_sizes_are_not_remembered() -> None:
    graph = fx.symbolic_trace(lambda x: x + 1)
    node = next(iter(graph.graph.nodes))
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        value = mode.from_tensor(torch.randn(4, 3), static_shapes=False)
    node.meta["val"] = value
    assert memory_known.digest_of((), graph, [value], None) is None
