"""Which expressions may be computed without need, and which may be left out."""

from __future__ import annotations

import ast

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.tensors import TORCH, TensorFacts, is_number

_NOT_HARMLESS = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)


class PurityFacts(TensorFacts):
    """Proofs about effects."""

    def pure(self, node: ast.AST, *, smooth: bool = False) -> bool:
        """Proved to have no side effect and to draw no random numbers, so that it may be computed without need.

        Args:
            smooth: also finite, with finite gradients, for finite input: what `torch.where` needs of a side not taken.
        """
        if isinstance(node, ast.Call):
            if not self._call_is_pure(node, smooth):
                return False
            below = [*node.args, *(k.value for k in node.keywords)]
            below += [node.func.value] if isinstance(node.func, ast.Attribute) and self.is_method(node) else []
            module = isinstance(node.func, ast.Attribute) and self.made_from(node.func)
            return all(self.pure(part, smooth=smooth) for part in (node.args if module else below))
        if isinstance(node, ast.BinOp) and smooth:
            safe = isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.MatMult | ast.BitAnd | ast.BitOr)
            by_number = isinstance(node.op, ast.Div) and is_number(node.right)
            square = (
                isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in (1, 2, 3)
            )
            if not (safe or by_number or square):
                return False
        allowed = (ast.Name, ast.Constant, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Slice,
                   ast.Tuple, ast.List, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop)  # fmt: skip
        return isinstance(node, allowed) and all(self.pure(c, smooth=smooth) for c in ast.iter_child_nodes(node))

    def _call_is_pure(self, node: ast.Call, smooth: bool) -> bool:
        if isinstance(node.func, ast.Attribute) and self.made_from(node.func) in tables.PURE_MODULES:
            return not smooth  # computing a layer in vain costs; `torch.cond` does not
        found = self.torch_call(node)
        if found is None:
            return False
        name, _ = found
        if any(k.arg in ("out", "inplace", None) for k in node.keywords):
            return False
        method = self.is_method(node)
        if smooth:
            cheap = tables.POINTWISE_SMOOTH | tables.POINTWISE_BOOL | {"maximum", "minimum", "zeros_like", "ones_like"}
            cheap |= {
                "full_like",
                "sum",
                "mean",
                "amax",
                "amin",
                "reshape",
                "view",
                "masked_fill",
                "softmax",
                "mul",
                "add",
            }
            return name in cheap
        return name in tables.PURE or (not method and name in tables.PURE_CONSTRUCTORS)

    def harmless(self, node: ast.AST) -> bool:
        """Whether leaving out the expression's evaluation changes nothing else."""
        if isinstance(node, _NOT_HARMLESS):
            return False
        if isinstance(node, ast.Call):
            dotted = self.scope.dotted(node.func)
            if dotted is not None:
                known = dotted in tables.HARMLESS or (
                    dotted.startswith(TORCH) and dotted.rpartition(".")[2] in tables.PURE
                )
                if not known:
                    return False
            elif not (isinstance(node.func, ast.Attribute) and node.func.attr in tables.HARMLESS_METHODS):
                return False
        return all(self.harmless(child) for child in ast.iter_child_nodes(node))
