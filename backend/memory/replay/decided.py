"""What only data decides in a wrapper that Inductor generated, decided ahead: which branch runs, how large a size is.

Of `torch.cond` both branches are run, one after the other: what they return is alike, and the peak is that of the
larger. A size that is read from a tensor is the most that it can be.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping


def decided(source: str, sizes: Mapping[str, int]) -> ast.Module:
    """The wrapper, with both branches of `if predicate.item(): ... else: ...` in a row, and `u0 = tensor.item()` as the
    number of that name in `sizes`."""
    module = ast.parse(source)
    if ".item()" in source:
        module = _Decided(sizes).visit(module)
    return ast.fix_missing_locations(module)


class _Decided(ast.NodeTransformer):
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id in self.sizes and _asks(node.value):
                return ast.Assign(targets=node.targets, value=ast.Constant(self.sizes[target.id]))
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if not _asks(node.test) or not node.orelse:
            return node
        # What the first holds goes before the second runs; what it releases the second still needs.
        first = [part for part in node.body if not isinstance(part, ast.Delete)]
        names = [target.id for part in first for target in _targets(part) if isinstance(target, ast.Name)]
        released = [
            ast.Assign(targets=[ast.Name(name, ast.Store())], value=ast.Constant(None)) for name in dict.fromkeys(names)
        ]
        return [*first, *released, *node.orelse]


def _asks(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "item"


def _targets(part: ast.stmt) -> list[ast.expr]:
    return part.targets if isinstance(part, ast.Assign) else []
