"""A branch on a tensor whose sides are all cheap and safe to compute: `torch.where`. Others: cond.py."""

from __future__ import annotations

import ast

from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites.conditions import predicate
from optpass.auditing.fixes.rewrites.decisions import (
    Choice,
    Plan,
    Value,
    bound_before,
    decided,
    is_elif,
    leaves,
    plan_of,
    tests,
)
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

#: What makes a tensor whose size depends on data: of an empty one, some reductions cannot be made.
_PLAIN = (
    ast.Name, ast.Constant, ast.Attribute, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.expr_context, ast.cmpop,
    ast.boolop, ast.unaryop,
)  # fmt: skip
_SIZES_BY_DATA = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "where"})


class WhereBranch:
    """`if tensor: y = a` / `else: y = b` -> `y = torch.where(tensor, a, b)`; also `elif`, and with `return`."""

    name = "where"
    note = "Both sides are computed in every call."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the `if` by one assignment or `return` per value."""
        branch = site.statement
        if not isinstance(branch, ast.If) or not in_test(site, branch) or site.torch is None:
            return None
        plan = plan_of(branch, site)
        if plan is None or not all(_exchangeable(choice, facts) for choice in plan.values.values()):
            return None
        lines = _binding(plan, site, facts)
        if lines is None:
            return None
        source, indent = site.source, site.source.indent(branch)
        lead = ""
        if is_elif(branch, site):
            lead, indent = f"{indent}else:{source.newline}", indent + source.unit
        start, end = source.whole_lines(branch, plan.last)
        text = "".join(f"{indent}{line}{source.newline}" for line in [*source.comments(start, end), *lines])
        return [*site.torch_import(), Edit(start, end, lead + text)]


class WhereExpression:
    """`a if tensor else b` -> `torch.where(tensor, a, b)`."""

    name = "where-expression"
    note = "Both sides are computed in every call."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the conditional expression."""
        parents = site.source.parents
        for place in site.expressions if site.exact else ():
            node: ast.AST | None = place
            while node is not None and not isinstance(node, ast.stmt):
                above = parents.get(node)
                if isinstance(above, ast.IfExp) and above.test is node:
                    return self._rewrite(above, site, facts)
                node = above
        return None

    def _rewrite(self, node: ast.IfExp, site: Site, facts: Facts) -> list[Edit] | None:
        choice = decided(node)
        if site.torch is None or not _exchangeable(choice, facts):
            return None
        conditions = _conditions([choice], site, facts)
        if conditions is None:
            return None
        return [*site.torch_import(), site.replace(node, _where(choice, conditions, site))]


def _exchangeable(choice: Value, facts: Facts) -> bool:
    """Whether all values are tensors of one shape and dtype that may all be computed, at no risk for the gradient."""
    values = leaves(choice)
    if not all(facts.tensor(value) and facts.pure(value, smooth=True) for value in values):
        return False
    shapes = {facts.shape(value) for value in values}
    # Values that convert to unlike dtypes would all become the widest.
    return None not in shapes and len(shapes) == 1 and len({facts.casts(value) for value in values}) == 1


def _conditions(choices: list[Value], site: Site, facts: Facts) -> dict[ast.expr, str | None] | None:
    """Text of each test as a tensor; None for one that is not proved to be one, which Python goes on to decide.

    None for all where a test may not be made without need, or the first is not a tensor: then it is not what broke.
    """
    found: dict[ast.expr, str | None] = {}
    for choice in choices:
        for test in tests(choice):
            found.setdefault(test, predicate(test, site, facts))
        first, *later = tests(choice)
        if found[first] is None or not all(_made_without_need(test, found[test], site, facts) for test in later):
            return None
    return found


def _made_without_need(test: ast.expr, text: str | None, site: Site, facts: Facts) -> bool:
    """Whether a test that was made only where the ones before it fail may be made always; `text`: as a tensor."""
    statement = site.statement
    for node in ast.walk(test):
        call = facts.torch_call(node)
        if isinstance(node, ast.Subscript) or (call is not None and call[0] in _SIZES_BY_DATA):
            return False
        if isinstance(node, ast.Name) and site.scope.local(node.id):
            branch = statement if isinstance(statement, ast.If) else None
            if node.id not in site.scope.parameters and not (branch and bound_before(node.id, branch, site)):
                return False
        if text is None and not isinstance(node, _PLAIN):
            return False  # whatever it asks of Python may fail where it was not asked before
        if text is None and isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
            return False
    return facts.harmless(test)


def _binding(plan: Plan, site: Site, facts: Facts) -> list[str] | None:
    """The assignments, or the `return`; tests that are used more than once are made first."""
    conditions = _conditions(list(plan.values.values()), site, facts)
    if conditions is None:
        return None
    lines = []
    if len(plan.values) > 1:
        base, number = site.scope.fresh("condition"), 1
        for test, text in conditions.items():
            if text is not None:
                name = base if number == 1 else site.scope.fresh(f"{base}_{number}")
                lines.append(f"{name} = {text}")
                conditions[test], number = name, number + 1
    for target, choice in plan.values.items():
        head = "return " if target is None else f"{target} = "
        lines.append(head + _where(choice, conditions, site))
    return lines


def _where(value: Value, conditions: dict[ast.expr, str | None], site: Site) -> str:
    if not isinstance(value, Choice):
        return site.source.segment(value) if hasattr(value, "lineno") else ast.unparse(value)
    test = conditions[value.test]
    yes, no = _where(value.yes, conditions, site), _where(value.no, conditions, site)
    if test is None:
        return f"({yes} if {site.source.segment(value.test)} else {no})"
    return f"{site.torch}.where({test}, {yes}, {no})"


def in_test(site: Site, branch: ast.If) -> bool:
    """Whether the break is in the branch's test."""
    inside = set(ast.walk(branch.test))
    return any(e in inside for e in site.expressions)
