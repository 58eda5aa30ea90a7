"""cuDNN's attention backward is given its gradient in the strides of the result; traced without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from optpass.backend import cudnn
from optpass.backend.cudnn import OPERATOR, THEIRS, laid_out, order_of, protect


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def heads_first() -> torch.Tensor:
    return torch.empty(3, 4, 20, 16, device="cuda", dtype=torch.bfloat16)


def heads_last() -> torch.Tensor:
    return torch.empty(3, 20, 4, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def traced(query: torch.Tensor, gradient: torch.Tensor) -> Any:
    def backward(gradient: torch.Tensor, q: torch.Tensor) -> Any:
        out, lse, _, _, n, m, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
        return THEIRS(gradient, q, q, q, out, lse, seed, offset, None, None, None, n, m, 0.0, False)

    return make_fx(backward)(gradient, query)


def targets(gm: Any) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("query", "gradient", "copied"),
    [
        (heads_first, heads_first, False),
        (heads_last, heads_last, False),
        (heads_first, heads_last, True),
        (heads_last, heads_first, True),
    ],
)
def test_a_gradient_in_another_layout_is_copied(query: Any, gradient: Any, copied: bool, fake: FakeTensorMode) -> None:
    gm = traced(query(), gradient())
    assert protect(gm) == 1
    gm.graph.lint()
    assert OPERATOR in targets(gm) and THEIRS not in targets(gm)
    assert (torch.ops.aten.clone.default in targets(gm)) is copied
    (node,) = (n for n in gm.graph.nodes if n.target is OPERATOR)
    given, like = (node.args[at].meta["val"].stride() for at in (0, 4))
    assert given == like == query().stride()
    assert [t.stride() for t in node.meta["val"]] == [query().stride()] * 3


def test_a_graph_without_it_is_left_alone(fake: FakeTensorMode) -> None:
    gm = make_fx(lambda x: x.sin())(heads_first())
    assert protect(gm) == 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_every_joint_graph_is_protected(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cudnn, "protect", seen.append)
    torch._dynamo.reset()
    options = {"inner": inner, "strict": True, "inductor": {"fallback_by_default": True} if inner == "inductor" else {}}
    torch.compile(lambda x: x.sin() * 2, backend="optpass", options=options)(torch.randn(3, requires_grad=True))
    assert len(seen) == 1


def test_the_operator_lays_out_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[int, ...]] = []

    def theirs(*args: Any, scale: float | None) -> Any:
        got.append(args[0].stride())
        return args[:3]

    monkeypatch.setattr(cudnn, "THEIRS", theirs)
    query, gradient = torch.randn(3, 20, 4, 16).transpose(1, 2), torch.randn(3, 4, 20, 16)
    rest = [torch.zeros(()) for _ in range(3)]
    for given in (gradient, query.clone()):
        cudnn._backward(given, query, query, query, query, *rest, None, None, None, 20, 20, 0.0, False, scale=0.25)
    assert got == [query.stride()] * 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_layouts(order: tuple[int, ...]) -> None:
    like = torch.randn(2, 3, 1, 5).permute(*order).contiguous().permute(*sorted(range(4), key=lambda d: order[d]))
    given = torch.randn(2, 3, 1, 5)
    assert laid_out(given, like).stride() == like.stride() and torch.equal(laid_out(given, like), given)
    assert laid_out(like, like) is like
    assert like.permute(*order_of(like.stride())).is_contiguous()


@pytest.mark.parametrize("query", [heads_first, heads_last])
@pytest.mark.parametrize("gradient", [heads_first, heads_last])
def test_inductor_calls_torchs_own(query: Any, gradient: Any, fake: FakeTensorMode) -> None:
    """On a gradient that is computed in the strides of the result: no Python in between, and no copy."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    from optpass.backend.compat import lowerings

    lowerings.install()
    gm = traced(query(), gradient())
    protect(gm)
    given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    lowered = GraphLowering(gm, example_inputs=given, shape_env=ShapeEnv())
    with V.set_graph_handler(lowered), V.set_fake_mode(fake):
        lowered.run(*given)
        called = [o for o in lowered.operations if getattr(o, "op_overload", None) is THEIRS]
        assert len(called) == 1 and not any(getattr(o, "op_overload", None) is OPERATOR for o in lowered.operations)
        assert list(called[0].inputs[0].get_stride()) == list(query().stride())
