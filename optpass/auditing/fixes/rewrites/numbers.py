"""A tensor's value taken as a number first, and used in a branch later: both become tensor operations."""

from __future__ import annotations

import ast
from dataclasses import replace

from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites.branches import WhereBranch, WhereExpression
from optpass.auditing.fixes.rewrites.cond import CondBranch
from optpass.auditing.fixes.rewrites.scalars import Flow, as_tensor, scalar_call
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit


class BranchOnNumber:
    """`n = t.item()`, then `if n > 0:` -> `n = t.detach()` and `torch.where(n > 0, ...)`."""

    name = "branch-on-number"
    note = "Where a side is cheap, both are computed in every call."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Rewrite the assignment and each branch on the number; its other uses must be tensor arithmetic."""
        call = scalar_call(site, facts)
        made = site.source.parents[call] if call is not None else None
        target = made.targets[0] if isinstance(made, ast.Assign) and len(made.targets) == 1 else None
        if call is None or not isinstance(target, ast.Name) or site.scope.value(target.id) is not call:
            return None
        tensor = facts.scalar_of(call)
        text = as_tensor(site, facts, tensor) if tensor is not None else None
        if text is None:
            return None
        flow, edits, done = Flow(site, facts), [site.replace(call, text)], list[ast.expr]()
        for load in site.scope.loads(target.id):
            test = _test_around(load, site)
            if test is None and not flow.tensor_math(load):
                return None
            if test is None or test in done:
                continue
            done.append(test)
            more = self._branch(test, replace(site, assumed=facts.names_seen() | {target.id}))
            if more is None:
                return None
            edits += [edit for edit in more if edit not in edits]
        return [*edits, *flow.edits] if done else None

    def _branch(self, test: ast.expr, site: Site) -> list[Edit] | None:
        statement = site.source.statement(test)
        assert statement is not None
        there = replace(site, statement=statement, expressions=(test,), exact=True)
        facts = Facts(there)
        for rewrite in (WhereBranch(), WhereExpression(), CondBranch()):
            edits = rewrite.edits(there, facts)
            if edits is not None:
                return edits
        return None


def _test_around(load: ast.Name, site: Site) -> ast.expr | None:
    """The test of the `if` or conditional expression that the name is read in."""
    node: ast.AST = load
    for above in site.source.enclosing(load, ast.If, ast.IfExp):
        if isinstance(above, ast.If | ast.IfExp) and any(inner is node for inner in ast.walk(above.test)):
            return above.test
    return None
