"""A tensor's truth as a tensor: what the test of a branch becomes when the branch becomes `torch.where`."""

from __future__ import annotations

import ast

from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.site import Site


def predicate(test: ast.expr, site: Site, facts: Facts, *, top: bool = True) -> str | None:
    """Text of a boolean tensor without dimensions that is true where Python takes the test for true.

    None where the test is not proved to be made of tensors alone, or has side effects.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = predicate(test.operand, site, facts, top=False)
        return None if inner is None else f"~{inner}"
    if isinstance(test, ast.BoolOp):
        parts = [predicate(value, site, facts, top=False) for value in test.values]
        if any(part is None for part in parts):
            return None
        text = (" & " if isinstance(test.op, ast.And) else " | ").join(part for part in parts if part is not None)
        return text if top else f"({text})"
    inner_tensor = facts.scalar_of(test)
    if inner_tensor is not None:  # bool(t), t.item() as the whole test
        return predicate(inner_tensor, site, facts, top=top) if tensor_like(inner_tensor, facts) else None
    return _atom(test, site, facts, top)


def _atom(test: ast.expr, site: Site, facts: Facts, top: bool) -> str | None:
    if isinstance(test, ast.Compare):
        if any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in test.ops):
            return None
        if len(test.ops) > 1:
            return _chain(test, site, facts, top)
    if not tensor_like(test, facts) or not facts.pure(without_scalars(test, facts)):
        return None
    text = site.source.rewritten(test, scalars_as_tensors(test, site, facts))
    if "\n" in text:
        return None
    simple = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    if not facts.boolean(without_scalars(test, facts)):
        text, simple = f"({text} != 0)" if simple else f"(({text}) != 0)", True
    if not facts.zero_dim(test):
        return f"{text}.reshape(())" if simple else f"({text}).reshape(())"
    return text if simple or top else f"({text})"


def _chain(test: ast.Compare, site: Site, facts: Facts, top: bool) -> str | None:
    """`a < t < b` -> `(a < t) & (t < b)`."""
    sides = [test.left, *test.comparators]
    parts = []
    for left, op, right in zip(sides, test.ops, sides[1:], strict=False):
        pair = ast.Compare(left, [op], [right])
        if not facts.pure(left) or not facts.pure(right) or not facts.zero_dim(pair) or not facts.tensor(pair):
            return None
        pieces = [site.source.segment(side) for side in (left, right)]
        if any("\n" in piece or isinstance(s, ast.IfExp) for piece, s in zip(pieces, (left, right), strict=True)):
            return None
        sign = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}[type(op)]
        parts.append(f"({pieces[0]} {sign} {pieces[1]})")
    return " & ".join(parts) if top else f"({' & '.join(parts)})"


def tensor_like(node: ast.expr, facts: Facts) -> bool:
    """Whether the expression is a tensor, or becomes one when its `.item()` calls are left out."""
    return facts.tensor(without_scalars(node, facts))


def without_scalars(node: ast.expr, facts: Facts) -> ast.expr:
    """The expression with `t.item()` and its like as `t`; other nodes are the file's own, so that positions stay."""
    inner = facts.scalar_of(node)
    if inner is not None and facts.tensor(inner):
        return inner
    if isinstance(node, ast.Compare):
        new = ast.Compare(
            without_scalars(node.left, facts), node.ops, [without_scalars(c, facts) for c in node.comparators]
        )
        return node if new.left is node.left and new.comparators == node.comparators else ast.copy_location(new, node)
    if isinstance(node, ast.BinOp):
        left, right = without_scalars(node.left, facts), without_scalars(node.right, facts)
        same = left is node.left and right is node.right
        return node if same else ast.copy_location(ast.BinOp(left, node.op, right), node)
    if isinstance(node, ast.UnaryOp):
        operand = without_scalars(node.operand, facts)
        return node if operand is node.operand else ast.copy_location(ast.UnaryOp(node.op, operand), node)
    return node


def scalars_as_tensors(node: ast.expr, site: Site, facts: Facts) -> dict[ast.expr, str]:
    """The `.item()` calls in the expression, and what stands in their place."""
    found: dict[ast.expr, str] = {}
    waiting: list[ast.expr] = [node]
    while waiting:
        current = waiting.pop()
        inner = facts.scalar_of(current)
        if inner is not None and facts.tensor(inner):
            text = site.source.segment(inner)
            found[current] = (
                text if isinstance(inner, ast.Name | ast.Call | ast.Attribute | ast.Subscript) else f"({text})"
            )
        else:
            waiting += [child for child in ast.iter_child_nodes(current) if isinstance(child, ast.expr)]
    return found
