"""Attention whose projections are split over processes: on tensors of each process, and on DTensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import optpass

WIDTH, HEADS = 64, 4

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch is without gloo"),
    pytest.mark.usefixtures("clean", "seeded", "alone"),
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1) * 0.25).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


def split(model: nn.Module, *, local: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = {name: ColwiseParallel(use_local_output=local) for name in "qkv"}
    parallelize_module(model, init_device_mesh("cpu", (1,)), {**columns, "o": RowwiseParallel()})


def trained(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    out = call(x)
    out.square().sum().backward()
    whole = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
    return [out.detach(), *whole]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("local", [True, False], ids=["of each process", "DTensors"])
def test_attention_of_split_projections(local: bool, inner: str) -> None:
    model = Attention()
    exact = copy.deepcopy(model).double()
    split(model, local=local)
    x = torch.randn(2, 48, WIDTH)
    step = torch.compile(model, backend="optpass", options={"inner": inner, "attention": "always"})
    ours, theirs = trained(model, step, x), trained(exact, exact, x.double())
    for one, other in zip(ours, theirs, strict=True):
        assert float((one.double() - other).abs().max()) <= 1e-5 * float(other.abs().max())
    report = optpass.report()
    assert len(report.sites("attention")) == local
    assert local or ["DTensor" in site.reason for site in report.declined("attention")] == [True]
    assert not [record.error for graph in report.graphs for record in graph.passes if record.error]
