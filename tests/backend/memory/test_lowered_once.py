"""A plan that was lowered to be replayed is compiled from that, through the whole backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor import sizevars
from torch._inductor.codegen import cpp
from torch._inductor.graph import GraphLowering
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from optpass.backend.compat import cache_counters
from optpass.backend.compat.memory import indices_kept
from optpass.backend.memory.partition import carrier
from optpass.errors import BudgetInfeasibleError


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("binds", [True, False])
def test_inductor_goes_on_from_the_replay(monkeypatch: pytest.MonkeyPatch, binds: bool) -> None:
    replays: list[int] = []
    generated: list[GraphLowering] = []
    replay, codegen = carrier.replay_step, GraphLowering.codegen

    def replayed(*args: Any, **kwargs: Any) -> Any:
        found = replay(*args, **kwargs)
        replays.append(found.peak_bytes)
        return found

    def counted(graph: GraphLowering) -> Any:
        generated.append(graph)
        return codegen(graph)

    monkeypatch.setattr(carrier, "replay_step", replayed)
    monkeypatch.setattr(GraphLowering, "codegen", counted)
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())))
    x = torch.randn(256, 32)
    held = sum(p.numel() * 4 for p in net.parameters()) + x.numel() * 4
    budget = held + (190_000 if binds else 10**9)
    options = {"memory_budget": budget, "optimizer": "none"}
    torch.compiler.reset()
    with inductor.patch(force_disable_caches=True):
        torch.compile(lambda x: net(x).square().mean(), backend="optpass", options=options)(x).backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).square().mean().backward()
    torch.testing.assert_close(gradients, [p.grad for p in net.parameters()])
    assert len(replays) >= 1
    assert len(generated) == 2 * len(replays)


@pytest.mark.slow
@pytest.mark.by_turns
def test_equal_graphs_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two, three, four, five = self.parts  # a break in a loop would leave all of it to eager
            x = one(x)
            torch._dynamo.graph_break()
            x = two(x)
            torch._dynamo.graph_break()
            x = three(x)
            torch._dynamo.graph_break()
            x = four(x)
            torch._dynamo.graph_break()
            return five(x).square().mean()

    torch.manual_seed(0)
    net, x = Net(), torch.randn(256, 32)
    options = {"memory_budget": "1GB", "optimizer": "none"}
    model = torch.compile(net, backend="optpass", options=options)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        before = cache_counters()
        model(x).backward()
        after = cache_counters()
    gradients = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).backward()
    torch.testing.assert_close(gradients, [p.grad for p in net.parameters()])
    # That of the first layer has no gradient of its input, and the last has the loss: three that differ.
    found = {what: after[what] - before[what] for what in ("fxgraph_cache_miss", "fxgraph_cache_hit")}
    assert found == {"fxgraph_cache_miss": 2 * 3, "fxgraph_cache_hit": 2 * 2}


def test_an_index_is_looked_into_once_for_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    small = sizevars.stride_at_vec_range
    found: list[tuple[int, int]] = []
    replay = carrier.replay_step

    def replayed(*args: Any, **kwargs: Any) -> Any:
        before = cpp.stride_at_vec_range.cache_info().misses
        result = replay(*args, **kwargs)
        after = cpp.stride_at_vec_range.cache_info()
        found.append((after.misses - before, after.currsize))
        return result

    monkeypatch.setattr(carrier, "replay_step", replayed)
    net = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))))
    x = torch.randn(256, 32)
    options = {"memory_budget": 1, "optimizer": "none"}
    torch.compiler.reset()
    with pytest.raises(BudgetInfeasibleError), inductor.patch(force_disable_caches=True):
        torch.compile(lambda x: net(x).square().mean(), backend="optpass", options=options)(x)
    assert len(found) >= 2 and found[0][0] > 0
    assert sum(misses for misses, _ in found) == found[-1][1] < 2 * found[0][0]
    assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range is small


def test_answers_of_the_larger_cache_are_those_of_the_smaller() -> None:
    x, y = sympy.symbols("x y", integer=True, nonnegative=True)
    indices = [x + 3 * y, 8 * (x // 8) + y, FloorDiv(x, 16) + y, ModularIndexing(x, 1, 32) + 5 * y, y]
    plain = [sizevars.stride_at_vec_range(index, x, 16) for index in indices]
    with indices_kept():
        assert [sizevars.stride_at_vec_range(index, x, 16) for index in indices] == plain
