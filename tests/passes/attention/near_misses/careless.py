"""What the pass must not be: a rewrite that looks at nothing. The comparison has to catch it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_near_misses.check import Counting
from torch import fx

PRODUCTS = ("matmul", "bmm")


def rewrite(gm: fx.GraphModule) -> None:
    """Two products with a softmax between them become SDPA, whatever else is there."""
    products = [n for n in gm.graph.nodes if any(p in str(n.target) for p in PRODUCTS)]
    for last in products:
        step: Any = last.args[0]
        chain = [step]
        while isinstance(step, fx.Node) and step not in products and step.all_input_nodes:
            step = step.all_input_nodes[0]
            chain.append(step)
        if step not in products or not any("softmax" in str(n.target) for n in chain):
            continue
        if _length(step.args[1], -1) != _length(last.args[1], -2):
            continue  # keys without values: SDPA does not check, reads beyond them, and writes gradients there
        with gm.graph.inserting_before(last):
            key = gm.graph.call_method("transpose", (step.args[1], -2, -1))
            attention = torch.nn.functional.scaled_dot_product_attention
            fused = gm.graph.call_function(attention, (step.args[0], key, last.args[1]))
        last.replace_all_uses_with(fused)
    gm.recompile()


def _length(node: Any, dim: int) -> Any:
    """Elements along `dim`, as Dynamo saw them."""
    return node.meta["example_value"].shape[dim]


def compiler(counting: Counting) -> Callable[[Any], Any]:
    """`torch.compile` with that rewrite."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewrite(gm)
        return counting(gm, inputs)

    return lambda call: torch.compile(call, backend=backend)
