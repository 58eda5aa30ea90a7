"""Sizes among a graph's inputs, and the tensors among them that have these sizes.

Dynamo hands a dynamic size over beside the tensors that have it. A graph that is compiled again must not be given it as
a number of its own: Dynamo would take that for a constant, and the tensor's size with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optpass.backend import snapshot


def take_sizes_from_tensors(given: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A copy of the graph that reads each size which a tensor among its inputs has from that tensor.

    Returns:
        It, and the positions of the inputs that are left. A size that no tensor has is one of them.
    """
    module = fx.GraphModule(given, snapshot.copy_graph(given.graph, keep=True))
    nodes = module.graph.find_nodes(op="placeholder")
    kept: list[int] = []
    for position, node in enumerate(nodes):
        bound = _bound(node.meta.get("example_value"), nodes)
        if bound is None:
            kept.append(position)
            continue
        tensor, dimension = bound
        with module.graph.inserting_after(nodes[-1]):
            size = module.graph.call_method("size", (tensor, dimension))
        size.meta.update(node.meta)
        node.replace_all_uses_with(size)
    for position, node in enumerate(nodes):
        if position not in kept:
            module.graph.erase_node(node)
    module.recompile()
    return module, tuple(kept)


def symbol_of(value: Any) -> Any | None:
    """The symbol that a dynamic size is; None for a number or an expression."""
    expression = getattr(getattr(value, "node", None), "expr", None)
    return expression if isinstance(value, torch.SymInt) and getattr(expression, "is_Symbol", False) else None


def _bound(value: Any, nodes: list[fx.Node]) -> tuple[fx.Node, int] | None:
    symbol = symbol_of(value)
    if symbol is None:
        return None
    for node in nodes:
        tensor = node.meta.get("example_value")
        if isinstance(tensor, torch.Tensor):
            for dimension, size in enumerate(tensor.shape):
                if symbol_of(size) == symbol:
                    return node, dimension
    return None
