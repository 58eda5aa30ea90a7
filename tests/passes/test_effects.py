"""What ops write to, against what they really write to."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from optpass.passes.effects import op_name, written


def calls(function: Any, *inputs: Any) -> list[fx.Node]:
    """Nodes of what Dynamo makes of `function`."""
    found: list[fx.Node] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.extend(n for n in gm.graph.nodes if n.op.startswith("call"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found


def names(node: fx.Node) -> set[str]:
    return {n.name for n in written(node)[0]}


def x() -> torch.Tensor:
    return torch.randn(3, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.add_(1),
        lambda a: a.__iadd__(1),
        lambda a: operator.iadd(a, 1),
        lambda a: torch.relu_(a),
        lambda a: F.relu(a, inplace=True),
        lambda a: F.relu(a, True),
        lambda a: F.dropout(a, 0.5, True, True),
        lambda a: torch.ops.aten.add_.Tensor(a, a),
        lambda a: a.__setitem__(0, 1.0),
        lambda a: torch._foreach_add_([a], 1),
    ],
)
def test_writers(function: Any) -> None:
    nodes = calls(lambda a: (function(a), a + 1)[1], x())
    writer = next(n for n in nodes if written(n)[0])
    assert any(n.op == "placeholder" for n in written(writer)[0])
    assert written(writer)[1] or "_foreach" in str(writer.target)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a + 1,
        lambda a: F.relu(a),
        lambda a: F.relu(a, inplace=False),
        lambda a: F.linear(a, a),
        lambda a: a.__add__(1),
        lambda a: F.layer_norm(a, (3,)),
        lambda a: torch.einsum("ij,jk->ik", a, a),
        lambda a: F.scaled_dot_product_attention(a, a, a),
        lambda a: torch.ops.aten.add.Tensor(a, a),
        lambda a: a[0],
        lambda a: torch.stack([a, a]),
        lambda a: torch.split(a, 1)[0],
    ],
)
def test_readers(function: Any) -> None:
    assert [names(n) for n in calls(function, x()) if written(n)[0]] == []


def test_out_and_running_statistics() -> None:
    def out(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.add(a, 1, out=b)
        return b + 1

    nodes = calls(out, x(), x())
    (writer,) = [n for n in nodes if written(n)[0]]
    assert names(writer) == {str(writer.kwargs["out"])}

    def norm(a: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(a, m, v, training=True)

    touched = {n for node in calls(norm, x(), torch.zeros(3), torch.ones(3)) for n in names(node)}
    assert len(touched) >= 2  # both statistics, and what cannot be told apart from them


def test_an_embedding_that_renormalises() -> None:
    nodes = calls(lambda i, w: F.embedding(i, w, max_norm=1.0), torch.tensor([0]), x())
    assert any(written(n)[0] for n in nodes)


def test_what_is_not_known_may_write(fresh_name: str) -> None:
    torch.library.define(f"{fresh_name}::mutate", "(Tensor(a!) x) -> ()")
    torch.library.define(f"{fresh_name}::pure", "(Tensor x) -> Tensor")
    home = getattr(torch.ops, fresh_name)

    def own(a: Any) -> Any:
        return a

    graph = fx.Graph()
    a = graph.placeholder("a")
    assert written(graph.call_function(home.mutate, (a,))) == ([a], False)
    assert written(graph.call_function(home.mutate.default, (a,))) == ([a], True)
    assert written(graph.call_function(home.mutate.default, (), {"x": a})) == ([a], True)
    assert written(graph.call_function(home.pure, (a,))) == ([], True)
    assert written(graph.call_function(own, (a,))) == ([a], False)
    assert written(graph.call_module("child", (a,))) == ([a], False)
    assert written(graph.call_function(torch.ops.higher_order.wrap, (own, a))) == ([a], False)


@pytest.fixture
def fresh_name(request: pytest.FixtureRequest) -> str:
    return f"optpass_test_{abs(hash(request.node.nodeid)) % 10**9}"


def test_names_are_of_torch_only() -> None:
    def view(a: Any) -> Any:
        return a

    graph = fx.Graph()
    a = graph.placeholder("a")
    assert op_name(graph.call_function(view, (a,))) == ""
    assert op_name(graph.call_function(torch.transpose, (a, 0, 1))) == "transpose"
    assert op_name(graph.call_function(torch.Tensor.view, (a, -1))) == "view"
    assert op_name(graph.call_function(getattr, (a, "T"))) == "T"
    assert op_name(graph.call_method("permute", (a, 1, 0))) == "permute"
    assert op_name(a) == ""
