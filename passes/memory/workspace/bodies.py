"""What a higher-order operator (`cond`, `scan`, `while_loop`) holds while the graphs inside it run, beside its outputs.

Inside, values are released after their last use, as FX's generated code does. A branch gives its outputs to the caller;
a loop copies them, or holds those of the last round while the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.passes.memory.storage import is_item, nbytes, view_base

#: Hands on what its branch returns; the others loop.
_BRANCHES = torch.ops.higher_order.cond
#: An element of an index tensor.
_INDEX_BYTES = 8

Inner = Callable[[fx.Node], int]


def bodies_bytes(target: Any, args: Sequence[Any], inner: Inner, hint: Callable[[Any], int]) -> int:
    """Bytes that a call allocates and releases inside itself; 0 without a graph among its arguments.

    Args:
        target: the higher-order operator.
        args: its arguments, with the graphs themselves.
        inner: the same of one node of such a graph, whose own workspace counts too.
        hint: int for a symbolic size.
    """
    most = 0
    beside = _kept_by_scan(args, hint) if target is torch.ops.higher_order.scan else 0
    for body in (arg for arg in args if isinstance(arg, fx.GraphModule)):
        peak, left = _peak(body.graph, inner, hint)
        most = max(most, peak - left if target is _BRANCHES else peak + left + beside)
    return most


def _kept_by_scan(args: Sequence[Any], hint: Callable[[Any], int]) -> int:
    """Bytes beside the rounds: outputs of the first one, and indices that place outputs (`generic_scan` of
    torch/_higher_order_ops/scan.py), of which one is multiplied by the number of the round."""
    body, carried = args[0], len(args[1])
    outputs = next(node for node in body.graph.nodes if node.op == "output").args[0]
    values = [node.meta.get("val") for node in outputs[carried:] if isinstance(node, fx.Node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    indices = [_INDEX_BYTES * hint(value.numel()) for value in tensors]
    return sum(indices) + max(indices, default=0) + sum(nbytes(value, hint) for value in tensors)


def _peak(graph: fx.Graph, inner: Inner, hint: Callable[[Any], int]) -> tuple[int, int]:
    """Most bytes at one time above the inputs, and those of the outputs."""
    home: dict[fx.Node, fx.Node] = {}
    size: dict[fx.Node, int] = {}
    allocated: dict[fx.Node, int] = {}
    results: dict[tuple[Any, ...], fx.Node] = {}
    for node in graph.nodes:
        several = node.args[0] if is_item(node) else None
        base = several if isinstance(several, fx.Node) else view_base(node)
        # Each result of an operator that gives several is a storage of its own; those of `split` are views of one.
        item = base if base is several and base is not None and home[base] is base else None
        if item is not None:
            base = results.setdefault(node.args, node)
        home[node] = home.get(base, base) if base is not None else node
        if node.op == "call_function" and home[node] is node:
            size[node] = sum(nbytes(value, hint) for value in _tensors(node.meta.get("val")))
            allocated[node] = 0 if item is not None else size[node]
            if item in size:  # what no item takes goes with the tuple
                size[item] -= size[node]
    last = {home[used]: node for node in graph.nodes for used in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for storage, node in last.items():
        dying.setdefault(node, []).append(storage)
    live = peak = 0
    for node in graph.nodes:
        if node.op == "output":
            break
        live += allocated.get(node, 0)
        peak = max(peak, live + (inner(node) if node.op == "call_function" else 0))
        gone = dying.get(node, ()) if node in last else (*dying.get(node, ()), node)  # nobody reads it
        live -= sum(size.get(storage, 0) for storage in gone if home[storage] is storage)
    return peak, live


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
