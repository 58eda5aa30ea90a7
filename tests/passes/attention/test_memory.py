"""At a fused training site nothing of the size of the scores is kept for the backward: read off the joint graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, fx, nn

import optpass
from optpass.models import build

B, H, S, D = 2, 3, 40, 8


class Saved:
    """An inner compiler that keeps what the forward graph hands to the backward, and runs both as they are."""

    def __init__(self) -> None:
        self.forwards: list[list[torch.Size]] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def forward(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            (returned,) = next(n for n in graph.graph.nodes if n.op == "output").args
            values = [n.meta.get("val") for n in returned if isinstance(n, fx.Node)]
            self.forwards.append([v.shape for v in values if isinstance(v, Tensor)])
            return make_boxed_func(graph.forward)

        def backward(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            return make_boxed_func(graph.forward)

        return aot_module_simplified(gm, inputs, fw_compiler=forward, bw_compiler=backward)


def saved(function: Callable[..., Tensor], *inputs: Tensor, mode: str) -> int:
    """Elements of the largest tensor that the forward returns, saved ones included."""
    torch._dynamo.reset()
    watch = Saved()
    out = torch.compile(function, backend="optpass", options={"inner": watch, "attention": mode})(*inputs)
    out.sum().backward()
    assert watch.forwards
    return max(math.prod(shape) for shapes in watch.forwards for shape in shapes)


def operands() -> list[Tensor]:
    return [torch.randn(B, H, S, D, requires_grad=True) for _ in range(3)]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / D**0.5, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / D**0.5
    return scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(S) < torch.tensor([S, S - 7])[:, None]
    return (q @ k.mT + torch.where(mask, 0.0, torch.finfo(q.dtype).min)[:, None, None]).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:, :1].repeat_interleave(H, 1).mT).softmax(-1) @ v[:, :1].repeat_interleave(H, 1)


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v


def two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of halves of q and k, as those of contents and positions: no bias takes the place of the second."""
    half = D // 2
    return (q[..., :half] @ k[..., :half].mT + q[..., half:] @ k[..., half:].mT / 2).softmax(-1) @ v


@pytest.mark.slow
@pytest.mark.parametrize("function", [plain, causal, padded, grouped, upcast, two_products])
def test_no_scores_are_saved(function: Callable[..., Tensor]) -> None:
    scores = B * H * S * S
    assert saved(function, *operands(), mode="off") >= scores  # the measure sees them where they are
    assert saved(function, *operands(), mode="always") < scores
    (site,) = optpass.report().sites("attention")[-1:]
    assert site.cost["bytes_not_saved"] >= scores * 4


class Taken(nn.Module):
    """A model, its loss a sum of what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        found = self.model(*inputs)
        return sum(t.sum() for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_models(name: str) -> None:
    length = 120  # no other size of these models
    model, inputs = build(name, "tiny", seq=length, context=length)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def squares(mode: str) -> int:
        torch._dynamo.reset()
        watch = Saved()
        torch.compile(Taken(model), backend="optpass", options={"inner": watch, "attention": mode})(*inputs).backward()
        return sum(shape.count(length) > 1 for shapes in watch.forwards for shape in shapes)

    assert squares("off") >= 2
    assert squares("always") <= 1  # the mask itself, where it is an operand
