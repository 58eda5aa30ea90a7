"""A model exported by torch.onnx counts as torch counts it."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optpass.passes.onnx_roofline import OnnxFacts, program_of_onnx
from optpass.passes.roofline.flops import op_cost
from optpass.passes.roofline.program import Program

pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.attention = nn.Embedding(50, 32), nn.LayerNorm(32), Attention(32, 4)
        self.mlp = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.attention(self.norm(x))
        return torch.softmax(x + self.mlp(x), dim=-1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, groups=4)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.first(x)), 2)
        return self.head(torch.sigmoid(self.norm(self.second(x))).mean(dim=(2, 3)))


def _torch_flops(model: nn.Module, example: torch.Tensor) -> float:
    graph = torch.export.export(model, (example,)).graph
    total = 0.0
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            cost = op_cost(node.target, args, kwargs, node.meta["val"])
            assert cost is not None, node.target
            total += cost.flops
    return total


Export = Callable[..., tuple[Program, OnnxFacts]]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    def run(model: nn.Module, example: torch.Tensor, opset: int, **options: Any) -> tuple[Program, OnnxFacts]:
        path = tmp_path / "model.onnx"
        dims = options.pop("dims", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (example,), path, opset_version=opset, dynamo=True, verbose=False, **options)
        return program_of_onnx(path, dims=dims)

    return run


def test_transformer(export: Export) -> None:
    model, ids = Transformer().eval(), torch.randint(0, 50, (2, 16))
    batch = torch.export.Dim("batch", min=1, max=64)
    program, facts = export(model, ids, 23, dynamic_shapes={"ids": {0: batch}}, dims={"batch": 2})
    assert sum(op.cost.flops for op in program.ops if op.cost is not None) == _torch_flops(model, ids)
    assert not program.unknown and facts.notes == ()
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    attention = next(op for op in program.ops if op.target == "onnx.Attention")
    assert attention.module == "attention"
    assert attention.file == __file__
    assert attention.line is not None and "scaled_dot_product_attention" in _line(attention.line)
    # Embedding and norm, residual and MLP input, ...: what lies between two products is one kernel.
    assert sum(g.kind == "matmul" for g in program.groups) == 4
    assert sum(g.kind == "attention" for g in program.groups) == 1


def _line(number: int) -> str:
    return Path(__file__).read_text().splitlines()[number - 1]


def test_convolutional(export: Export) -> None:
    model, image = Convolutional().eval(), torch.randn(2, 3, 16, 16)
    program, _ = export(model, image, 21)
    assert sum(op.cost.flops for op in program.ops if op.cost is not None) == _torch_flops(model, image)
    assert not program.unknown
