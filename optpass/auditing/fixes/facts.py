"""Everything that can be proved about an expression from the source alone; here, whether it is boolean, and its shape.

Every answer is "yes, proved" or "not proved". Types are in tensors.py, effects in purity.py.
"""

from __future__ import annotations

import ast

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.purity import PurityFacts
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import blocks
from optpass.auditing.fixes.tensors import is_number


class Facts(PurityFacts):
    """Proofs about expressions of the function that a site is in."""

    def boolean(self, node: ast.expr) -> bool:
        """Proved to be a tensor of booleans."""
        if isinstance(node, ast.Name):
            value = self.scope.value(node.id)
            return value is not None and self.boolean(value)
        if isinstance(node, ast.Compare):
            return self.tensor(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
            return self.boolean(node.left) and self.boolean(node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return self.boolean(node.operand)
        inner = self.scalar_of(node)
        if inner is not None:
            return self.boolean(inner)
        found = self.torch_call(node)
        return found is not None and found[0] in tables.POINTWISE_BOOL | tables.PAIR_BOOL | tables.REDUCTIONS_BOOL

    def casts(self, node: ast.expr) -> frozenset[str]:
        """What an expression converts to, by the text of each conversion: unequal texts may be unequal dtypes.

        Conversions of what it is computed from count too, as far as names have one value.
        """
        found: set[str] = {"bool"} if self.boolean(node) else set()
        names: set[str] = set()
        waiting: list[ast.AST] = [node]
        while waiting:
            current = waiting.pop()
            if isinstance(current, ast.Compare):
                continue  # gives booleans, whatever is compared
            waiting += ast.iter_child_nodes(current)
            if isinstance(current, ast.Name) and current.id not in names:
                names.add(current.id)
                value = self.scope.value(current.id)
                waiting += [value] if value is not None else []
            if isinstance(current, ast.keyword) and current.arg == "dtype":
                found.add(ast.unparse(current.value))
            call = self.torch_call(current)
            if call is not None and call[0] in tables.CASTS:
                found.add(f"{call[0]}({', '.join(ast.unparse(argument) for argument in call[1][1:])})")
        return frozenset(found)

    def zero_dim(self, node: ast.expr) -> bool:
        """Proved to be a tensor without dimensions, or a number."""
        if is_number(node) or self.scalar_of(node) is not None:
            return True
        if isinstance(node, ast.Name):
            value = self.scope.value(node.id)
            return value is not None and self.zero_dim(value)
        if isinstance(node, ast.BinOp):
            return self.zero_dim(node.left) and self.zero_dim(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.zero_dim(node.operand)
        if isinstance(node, ast.Compare):
            return self.zero_dim(node.left) and all(self.zero_dim(c) for c in node.comparators)
        found = self.torch_call(node)
        if found is None or not isinstance(node, ast.Call):
            return False
        name, args = found
        if name in tables.REDUCTIONS:
            return len(args) == 1 and not node.keywords
        return name in tables.POINTWISE | tables.POINTWISE_PAIR | tables.PAIR_BOOL and all(map(self.zero_dim, args))

    def shape(self, node: ast.expr) -> str | None:
        """A name for the expression's shape where it is evaluated: equal names, equal shapes. None: not known.

        Names of variables stand for themselves, so two answers compare only where no variable changes in between.
        """
        if is_number(node) or (self.zero_dim(node) and self.tensor(node)):
            return "()"
        if isinstance(node, ast.Name | ast.Attribute):
            return ast.unparse(node) if self.tensor(node) else None
        if isinstance(node, ast.UnaryOp):
            return self.shape(node.operand)
        pair = (ast.BinOp, ast.Compare)
        if isinstance(node, pair) and not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
            other = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
            return self._broadcast([node.left, other])
        found = self.torch_call(node)
        if found is None:
            return None
        name, args = found
        if name in tables.POINTWISE | tables.SAME_SHAPE:
            return self.shape(args[0]) if args else None
        if name in tables.POINTWISE_PAIR | tables.PAIR_BOOL and len(args) == 2:
            return self._broadcast(args)
        return self._broadcast(args) if name == "where" and len(args) == 3 else None

    def _broadcast(self, nodes: list[ast.expr]) -> str | None:
        shapes = {shape for shape in map(self.shape, nodes) if shape != "()"}
        return (shapes.pop() if shapes else "()") if len(shapes) < 2 else None


def same_moment(site: Site, first: ast.stmt, second: ast.stmt, names: set[str]) -> bool:
    """Whether no name is bound anew, and no tensor is written, between two statements of one block."""
    source = site.source
    block = source.block(first)
    if second not in block:
        return False
    for between in block[block.index(first) + 1 : block.index(second)]:
        for node in ast.walk(between):
            if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Store | ast.Del):
                return False
            if isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.endswith("__"):
                return False
            if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
                return False
        if any(True for _ in blocks(between)) and isinstance(between, ast.FunctionDef | ast.ClassDef):
            return False
    return True
