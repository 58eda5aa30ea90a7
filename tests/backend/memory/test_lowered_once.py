"""A plan that was lowered to be replayed is compiled from that, through the whole backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering

from optpass.backend.memory import partition


@pytest.mark.parametrize("binds", [False, True])
def test_inductor_goes_on_from_the_replay(monkeypatch: pytest.MonkeyPatch, binds: bool) -> None:
    replays: list[int] = []
    generated: list[GraphLowering] = []
    replay, codegen = partition.replay_step, GraphLowering.codegen

    def replayed(*args: Any, **kwargs: Any) -> Any:
        found = replay(*args, **kwargs)
        replays.append(found.peak_bytes)
        return found

    def counted(graph: GraphLowering) -> Any:
        generated.append(graph)
        return codegen(graph)

    monkeypatch.setattr(partition, "replay_step", replayed)
    monkeypatch.setattr(GraphLowering, "codegen", counted)
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
    x = torch.randn(256, 32)
    held = sum(p.numel() * 4 for p in net.parameters()) + x.numel() * 4
    budget = held + (250_000 if binds else 10**9)
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
