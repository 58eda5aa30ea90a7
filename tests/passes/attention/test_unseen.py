"""No softmax between two products is left alone without a reason, whatever stands around it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import optpass

pytestmark = pytest.mark.usefixtures("clean", "seeded")


class OwnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return weights * (grad - (grad * weights).sum(-1, keepdim=True)).sign()


def own_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OwnSoftmax.apply(q @ k.mT) @ v


def many_operations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    for _ in range(12):
        weights = weights.sin()
    return weights @ v


def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v[0, 0].mT @ (k[0, 0] @ q[0, 0, 0]).softmax(-1)


def added_to_something(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return torch.baddbmm(q.flatten(0, 1), weights.flatten(0, 1), v.flatten(0, 1))


def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(lambda scores: scores.softmax(-1), q @ k.mT, use_reentrant=False) @ v


def under_a_condition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).detach()
    return torch.cond(q.sum() > 0, lambda s: s.softmax(-1), lambda s: s.sigmoid(), (scores,)) @ v


def at_a_break(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    torch._dynamo.graph_break()
    return weights @ v


def differentiated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.grad(lambda q: ((q @ k.mT).softmax(-1) @ v).sum())(q.detach())


def single_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q[..., :1], k[..., :1, :1])
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v[..., :1, :])


def single_elements(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k[..., :1, :].mT).softmax(-1)
    return (weights.unsqueeze(-1) * v[..., :1, :].unsqueeze(-3)).sum(-2)


def accumulated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1).cumsum(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def one_number_for_each_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[..., :1, :] @ k.mT).softmax(-1)
    return (weights.unsqueeze(-1) * v[..., :1].unsqueeze(-3)).sum(-2)


def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (k @ q[:, :, 0, :, None]).softmax(-2)
    return (weights * v.double()).sum(-2).float()


def some_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)[..., 2:] @ v[:, :, 2:]


def written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[..., :2] *= 0.5
    return scores.softmax(-1) @ v


def used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + torch.nn.functional.gelu(weights).sum()


def thresholded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.relu((q @ k.mT).softmax(-1) - 0.02)
    return weights / weights.sum(-1, keepdim=True) @ v


def averaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exponentials = (q @ k.mT).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    return weights.mean(1, keepdim=True) @ v


def activated_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.leaky_relu(q @ k.mT, 0.2).softmax(-1) @ v


def averaged_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).mean(1, keepdim=True).softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def behind_a_break(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    torch._dynamo.graph_break()
    return scores.softmax(-1) @ v


def not_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).exp() @ v


def complex_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1).to(torch.complex64) @ torch.complex(v, v)).real


PROGRAMS: dict[Callable[..., Tensor], str] = {
    own_gradient: r"between .* stands an operation that is not looked into \(autograd_function_apply\)",
    many_operations: "between .* stands sin",
    one_query: "is mv, of a single vector",
    added_to_something: "baddbmm adds the product with v",
    recomputed: "between .* stands .*checkpoint",
    under_a_condition: r"between .* stands .* \(cond\)",
    differentiated: r"a transform of torch.func",
    single_numbers: "there is a single key",
    single_elements: "there is a single key",
    accumulated: "between .* stands cumsum",
    one_number_for_each_key: "written as a sum of products of elements",
    pooled: "written as a sum of products of elements",
    thresholded: r"between .* stands an operation that is not looked into \(relu\)",
    averaged: "between .* stands mean",
    averaged_scores: "stands mean, which is no step of attention that is known",
    activated_scores: "the softmax is of what leaky_relu returns, which is not looked into",
    some_keys: "some of the keys that the softmax runs over",
    written_to: "written to in place, through a view",
    used_twice: "the attention weights .* go to gelu",
    behind_a_break: "of what the graph is given: its scores, if it has any, come from before a graph break",
    not_divided: "exponentials meet v that are not divided by their sum",
    complex_values: "between .* stands _to_copy",
    at_a_break: "the weights leave the graph before they meet v",
}


def compiled(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
    options = {"inner": "eager", "strict": True, "attention": "always", "disable_passes": ["roofline"]}
    call: Callable[..., Tensor] = torch.compile(program, backend="optpass", options=options)
    return call


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_reason_is_given(program: Callable[..., Tensor]) -> None:
    inputs = [torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3)]
    torch.testing.assert_close(compiled(program)(*inputs), program(*inputs))
    (declined,) = optpass.report().declined("attention")
    assert re.search(PROGRAMS[program], declined.reason), declined.reason
    assert declined.file == __file__ and declined.line and declined.node


def test_softmin_is_looked_into() -> None:
    inputs = [torch.randn(2, 3, 6, 8) for _ in range(3)]
    compiled(lambda q, k, v: F.softmin(q @ k.mT, -1) @ v)(*inputs)
    assert len(optpass.report().sites("attention")) == 1


def test_sums_of_masked_weights_and_entropies_are_not_mentioned() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        seen = (weights * keep.to(weights.dtype)).sum(-1)
        return weights @ v, seen, -(weights * weights.log()).sum(-1)

    compiled(program)(*(torch.randn(2, 3, 6, 8) for _ in range(3)), torch.ones(2, 3, 6, 6) > 0)
    (declined,) = optpass.report().declined("attention")
    assert "the attention weights" in declined.reason


def test_what_is_no_attention_is_not_mentioned() -> None:
    """A classifier's probabilities leave the graph, and a router's multiply what the next layer reads."""

    def program(x: Tensor, router: Tensor, up: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = (x @ router).softmax(-1).topk(2, -1)
        x = torch.addmm(x, x * weights.sum(-1, keepdim=True), up)
        return (x @ head).softmax(-1), experts

    parameters = [torch.nn.Parameter(torch.randn(8, n)) for n in (4, 8, 16)]
    compiled(program)(torch.randn(6, 8), *parameters)
    assert not optpass.report().declined("attention") and not optpass.report().sites("attention")
