"""Tracing helpers for the FLOP tests: a function under fake tensors, to the costs of its ATen ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from optpass.passes.roofline.flops import OpCost, op_cost


@dataclass
class Traced:
    """What a trace cost: per-op costs in graph order, and the ops that no rule knows."""

    costs: list[tuple[str, OpCost]] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def flops(self) -> float:
        return sum(cost.flops for _, cost in self.costs)

    @property
    def transcendental(self) -> int:
        return sum(cost.transcendental for _, cost in self.costs)

    def of(self, kind: str) -> list[OpCost]:
        return [cost for _, cost in self.costs if cost.kind == kind]

    def named(self, op: str) -> list[OpCost]:
        return [cost for name, cost in self.costs if op in name]


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, torch.fx.Node) else x


def cost_of_graph(gm: torch.fx.GraphModule) -> Traced:
    traced = Traced()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args = torch.fx.node.map_arg(node.args, _value)
        kwargs = torch.fx.node.map_arg(node.kwargs, _value)
        cost = op_cost(node.target, args, dict(kwargs), node.meta.get("val"))
        if cost is None:
            traced.unknown[str(node.target)] += 1
        else:
            traced.costs.append((str(node.target), cost))
    return traced


def _trace(fn: Callable[..., Any], *inputs: Any, decompositions: Any = None) -> Traced:
    def call(*args: Any) -> Any:  # make_fx wants as many inputs as the signature has, defaults included
        return fn(*args)

    return cost_of_graph(make_fx(call, tracing_mode="fake", decomposition_table=decompositions)(*inputs))


@pytest.fixture(scope="session")
def trace() -> Callable[..., Traced]:
    """`trace(fn, *inputs, decompositions=None)`: the costs of `fn`'s ATen graph."""
    return _trace


@pytest.fixture(scope="session")
def trace_backward() -> Callable[..., Traced]:
    """`trace_backward(fn, *inputs)`: forward and backward with respect to every floating input.

    The gradient of the output is an input of the trace, so nothing but the op's own backward is added.
    """

    def run(fn: Callable[..., Any], *inputs: Any, decompositions: Any = None) -> Traced:
        wanted = [i for i, x in enumerate(inputs) if x.is_floating_point() or x.is_complex()]
        with torch.no_grad():
            grad = torch.ones_like(fn(*inputs))

        def joint(grad: torch.Tensor, *args: torch.Tensor) -> Any:
            leaves = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
            out = fn(*leaves)
            return torch.autograd.grad(out, [leaves[i] for i in wanted], grad, allow_unused=True)

        return _trace(joint, grad, *inputs, decompositions=decompositions)

    return run


@pytest.fixture(scope="session")
def trace_module() -> Callable[..., Traced]:
    """`trace_module(module, *inputs, decompositions=None, train=True)`: forward, sum, parameter gradients."""

    def run(module: torch.nn.Module, *inputs: Any, decompositions: Any = None, train: bool = True) -> Traced:
        module.train(train)
        state = dict(module.named_parameters()), dict(module.named_buffers())

        def joint(params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], *args: Any) -> Any:
            leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
            out = torch.func.functional_call(module, (leaves, buffers), args)
            tensors = [x for x in pytree.tree_leaves(out) if torch.is_tensor(x) and x.is_floating_point()]
            if not train or not leaves:
                return tensors
            return torch.autograd.grad(
                torch.stack([x.sum() for x in tensors]).sum(), list(leaves.values()), allow_unused=True
            )

        return _trace(joint, *state, *inputs, decompositions=decompositions)

    return run
