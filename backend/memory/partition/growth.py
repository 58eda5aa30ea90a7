"""Sizes that change from call to call: how much more a plan may need at other sizes than those it was made for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.backend.bound_sizes import symbol_of
from optpass.backend.memory.replay.graph_values import hint
from optpass.passes.memory.unbacked import has_value


class Growth:
    """The sizes of one graph's tensors as its plan has them.

    Attributes:
        positions: of the dynamic sizes among the graph's inputs.
    """

    def __init__(self, symbols: Sequence[tuple[int, Any, int]], sizes: Iterable[Any] | None) -> None:
        self.positions = tuple(position for position, _, _ in symbols)
        self._symbols = [symbol for _, symbol, _ in symbols]
        self._planned = tuple(value for _, _, value in symbols)
        self._sizes = None if sizes is None else list(sizes)
        self._known: dict[tuple[int, ...], float] = {}

    @classmethod
    def of(cls, gm: fx.GraphModule, values: Sequence[Any]) -> list[tuple[int, Any, int]]:
        """(position, symbol, value) of each dynamic size among the inputs of a Dynamo graph."""
        nodes = gm.graph.find_nodes(op="placeholder")
        found = []
        for position, (node, value) in enumerate(zip(nodes, values, strict=False)):
            symbol = symbol_of(node.meta.get("example_value"))
            if symbol is not None:
                found.append((position, symbol, int(hint(value))))
        return found

    def at(self, args: Sequence[Any]) -> float:
        """Of no tensor of the graph the bytes are more than so many times what they were planned as; 1 or more.

        Infinite at larger sizes where the tensors are not known.
        """
        values = tuple(int(args[i]) for i in self.positions)
        if all(now <= planned for now, planned in zip(values, self._planned, strict=True)):
            return 1.0
        if values not in self._known:
            self._known[values] = self._most(values)
        return self._known[values]

    def _most(self, values: tuple[int, ...]) -> float:
        if self._sizes is None:
            return math.inf
        now = dict(zip(self._symbols, values, strict=True))
        planned = dict(zip(self._symbols, self._planned, strict=True))
        most = 1.0
        for size in self._sizes:
            before = float(size.subs(planned))
            most = max(most, float(size.subs(now)) / before if before > 0 else 1.0)
        return most


def sizes_in(graph: fx.Graph) -> list[Any]:
    """The different symbolic sizes of a graph's tensors, in elements, but those that only running tells: these are
    planned at their largest."""
    found: dict[Any, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor):
                count = part.numel()
                if isinstance(count, torch.SymInt) and has_value(count.node):
                    found.setdefault(count.node.expr)
    return list(found)
