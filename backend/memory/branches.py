"""Branches of a wrapper that Inductor generated (`torch.cond`): which of them runs, only data tells.

Both are run, one after the other: what they return is alike, and the peak is that of the larger.
"""

from __future__ import annotations

import ast


def both(source: str) -> ast.Module:
    """The wrapper, with both branches of `if predicate.item(): ... else: ...` in a row."""
    module: ast.Module = _Both().visit(ast.parse(source)) if ".item():" in source else ast.parse(source)
    return ast.fix_missing_locations(module)


class _Both(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:  # as ast names it
        self.generic_visit(node)
        called = node.test.func if isinstance(node.test, ast.Call) else None
        if not isinstance(called, ast.Attribute) or called.attr != "item" or not node.orelse:
            return node
        # What the first holds goes before the second runs; what it releases the second still needs.
        first = [part for part in node.body if not isinstance(part, ast.Delete)]
        names = [target.id for part in first for target in _targets(part) if isinstance(target, ast.Name)]
        released = [
            ast.Assign(targets=[ast.Name(name, ast.Store())], value=ast.Constant(None)) for name in dict.fromkeys(names)
        ]
        return [*first, *released, *node.orelse]


def _targets(part: ast.stmt) -> list[ast.expr]:
    return part.targets if isinstance(part, ast.Assign) else []
