"""Numbers for symbolic sizes, from the sizes that the graph was traced with: to judge cost by, never for proofs."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from optpass.passes.attention.axes import expression

#: Taken for a size that the trace does not tell (a data-dependent one).
_UNKNOWN = 64


class Hints:
    """A number for each size expression of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._of: dict[Any, int] = {}
        for node in graph.nodes:
            value = node.meta.get("example_value")
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    self._learn(size)

    def _learn(self, size: torch.SymInt) -> None:
        expr, hint = size.node.expr, getattr(size.node, "hint", None)
        if isinstance(expr, sympy.Symbol) and isinstance(hint, int):
            self._of.setdefault(expr, hint)

    def __call__(self, size: Any) -> int:
        size = expression(size)
        if isinstance(size, int):
            return size
        known = {s: self._of.get(s, _UNKNOWN) for s in size.free_symbols}
        return int(size.subs(known))
