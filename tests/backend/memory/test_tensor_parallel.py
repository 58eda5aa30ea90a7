"""A budget for layers whose weights are split over processes: DTensors, of which each process has its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import optpass
from optpass.backend.memory.measure import measure_peak, storage_bytes

WIDTH, LAYERS = 128, 4

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch is without gloo"),
    pytest.mark.usefixtures("alone"),
]


class Layer(nn.Module):
    """As in a transformer: columns, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def ran(budget: int) -> tuple[int, list[torch.Tensor], float]:
    """The peak of a step, everything counted, the gradients, and the peak that the report predicts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch._dynamo.reset()
    optpass.reset_report()
    torch.manual_seed(3)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        parallelize_module(layer, init_device_mesh("cpu", (1,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    options: dict[str, Any] = {"inner": "aot_eager", "memory_budget": budget}
    step = torch.compile(model, backend="optpass", options=options)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(512, WIDTH)

    def once() -> None:
        step(x).pow(2).mean().backward()
        optimizer.step()

    for _ in range(4):
        optimizer.zero_grad()
        peak = measure_peak(once, torch.device("cpu"))
    held = storage_bytes([*model.parameters(), x]) + storage_bytes(optimizer.state.values())
    report = optpass.report()
    said = [site.cost for site in (*report.sites(), *report.declined()) if site.kind == "memory budget"]
    whole = [g.full_tensor() if hasattr(g := p.grad, "full_tensor") else g for p in model.parameters()]
    return peak.bytes_above_start + held, whole, max(cost["predicted_peak_bytes"] for cost in said)


def test_a_budget_holds_for_split_layers() -> None:
    most, theirs, predicted = ran(10**10)
    assert abs(predicted - most) <= 0.005 * most
    for share in (0.7, 0.85):
        peak, ours, predicted = ran(int(share * most))
        assert 0.9 * share * most <= peak <= share * most
        assert abs(predicted - peak) <= 0.005 * peak
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
