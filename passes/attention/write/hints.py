"""Symbolic sizes of one graph: numbers for them from the trace, to judge cost by, and the nodes that hold them.

Numbers are never for proofs. What a rewrite adds to the graph later is not looked at.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from optpass.passes.attention.axes import expression

#: Taken for a size that the trace does not tell (a data-dependent one).
_UNKNOWN = 64


class Hints:
    """A number for each size expression of one graph, and where it is held.

    Attributes:
        nodes: by size in the form of `held`, the first node that returns it.
        dims: by size, the first placeholder that has it, and in which dim.
        numbers: by expression, the first node that returns such a number, whole or not.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._of: dict[Any, int] = {}
        self.nodes: dict[Any, fx.Node] = {}
        self.dims: dict[Any, tuple[fx.Node, int]] = {}
        self.numbers: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            value = node.meta.get("example_value")
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for dim, size in enumerate(sizes):
                if not isinstance(size, (torch.SymInt, torch.SymFloat)):
                    continue
                if isinstance(size, torch.SymInt):
                    self._learn(size)
                if not isinstance(value, torch.Tensor):
                    self.numbers.setdefault(size.node.expr, node)
                    if isinstance(size, torch.SymInt):
                        self.nodes.setdefault(held(size), node)
                elif node.op == "placeholder":
                    self.dims.setdefault(held(size), (node, dim))

    def _learn(self, size: torch.SymInt) -> None:
        expr, hint = size.node.expr, getattr(size.node, "hint", None)
        if isinstance(expr, sympy.Symbol) and isinstance(hint, int):
            self._of.setdefault(expr, hint)

    def holder(self, size: Any, before: fx.Node) -> fx.Node | None:
        """The first node that returns this size for every value of its symbols, if it comes before another."""
        node = self.nodes.get(held(size))
        return node if node is not None and node < before else None

    def number(self, expr: Any, before: fx.Node) -> fx.Node | None:
        """The first node that returns a number of this expression, if it comes before another."""
        node = self.numbers.get(expr)
        return node if node is not None and node < before else None

    def __call__(self, size: Any) -> int:
        size = expression(size)
        if isinstance(size, int):
            return size
        known = {s: self._of.get(s, _UNKNOWN) for s in size.free_symbols}
        return int(size.subs(known))


def held(size: Any) -> Any:
    """The form of a size in which two are equal if `axes.equal` says so."""
    size = expression(size)
    return size if isinstance(size, int) else sympy.expand(size)
