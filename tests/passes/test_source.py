"""From nodes to the user's lines and modules, on graphs that Dynamo and AOTAutograd really made."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from optpass.passes.source import clean_path, locate


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))  # the line


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])
        self.named = nn.ModuleDict({"odd key": Inner()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.named["odd key"](x) + 1


def captured(model: Any, *inputs: Any) -> fx.Graph:
    graphs: list[fx.Graph] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_lines_and_modules_of_a_dynamo_graph() -> None:
    graph = captured(Outer(), torch.randn(2, 4))
    found = [locate(n) for n in graph.nodes if n.op == "call_function" and "relu" in str(n.target)]
    line = line_of(Inner.forward, "# the line")
    assert [(Path(s.file or "").name, s.line) for s in found] == [(Path(__file__).name, line)] * 3
    assert [s.module for s in found] == ["blocks.0", "blocks.1", "named.odd key"]
    linear = next(locate(n) for n in graph.nodes if "linear" in str(n.target) and n.op == "call_function")
    assert linear.module == "blocks.0.linear"
    assert linear.line == line  # not torch's own line in nn/modules/linear.py
    assert str(linear) == f"blocks.0.linear ({Path(__file__).name}:{line})"


def test_the_top_has_no_module_path() -> None:
    graph = captured(Outer(), torch.randn(2, 4))
    last = [n for n in graph.nodes if n.op == "call_function"][-1]
    assert locate(last).module is None
    assert locate(last).line == line_of(Outer.forward, "+ 1")


def test_a_node_without_metadata() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert str(locate(node)) == "unknown line"


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("L['self']._modules['blocks']._modules['0']._modules['attn']", "blocks.0.attn"),
        ("L['self'].blocks[0].attn", "blocks.0.attn"),
        ("L['self']", ""),
        ("L['self']._modules['a']._modules['b.c']", "a.b.c"),
        ("L__self___blocks_0", "L__self___blocks_0"),
        ("L['fn']._modules['head']", "head"),
        ("self_attn.k_proj", "self_attn.k_proj"),
        ("self", ""),
    ],
)
def test_paths(path: str, clean: str) -> None:
    assert clean_path(path) == clean
