"""A branch on a tensor whose sides are both cheap and safe to compute: `torch.where`. Others: cond.py."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites.conditions import predicate
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit


@dataclass(frozen=True)
class _Choice:
    """One value that the branch decides: `name = torch.where(test, yes, no)`, or returned where name is None."""

    name: str | None
    yes: ast.expr
    no: ast.expr


class WhereBranch:
    """`if tensor: y = a` / `else: y = b` -> `y = torch.where(tensor, a, b)`; also with `return`."""

    name = "where"
    note = "Both sides are computed in every call."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the `if` by one assignment or `return` per value."""
        branch = site.statement
        if not isinstance(branch, ast.If) or not in_test(site, branch) or site.torch is None:
            return None
        plan = _choices(branch, site, facts)
        test = predicate(branch.test, site, facts)
        if plan is None or test is None or not all(_exchangeable(c, facts) for c in plan.values):
            return None
        lines = [*_comments(site, plan), *_binding(plan, test, site)]
        indent = site.source.indent(branch)
        text = site.source.newline.join(indent + line for line in lines) + site.source.newline
        return [*site.torch_import(), Edit(*site.source.whole_lines(branch, plan.last), text)]


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
        test = predicate(node.test, site, facts)
        choice = _Choice(None, node.body, node.orelse)
        if test is None or site.torch is None or not _exchangeable(choice, facts):
            return None
        new = f"{site.torch}.where({test}, {site.source.segment(node.body)}, {site.source.segment(node.orelse)})"
        return [*site.torch_import(), site.replace(node, new)]


@dataclass(frozen=True)
class _Plan:
    """What an `if` decides, and the last statement that the rewriting replaces."""

    values: list[_Choice]
    last: ast.stmt


def _choices(branch: ast.If, site: Site, facts: Facts) -> _Plan | None:
    """The values that an `if` decides, if that is all it does."""
    source = site.source
    if not source.alone(branch) or is_elif(branch, site):
        return None
    if all(isinstance(body[-1], ast.Return) for body in (branch.body, branch.orelse or branch.body)):
        return _returned(branch, site)
    yes, no = _assignments(branch.body), _assignments(branch.orelse)
    if yes is None or no is None:
        return None
    names = [*yes, *(name for name in no if name not in yes)]
    values = []
    for name in names:
        before = ast.Name(name, ast.Load())
        if not (name in yes and name in no) and not bound_before(name, branch, site):
            return None
        values.append(_Choice(name, yes.get(name, before), no.get(name, before)))
    read = {c.name: {n.id for e in (c.yes, c.no) for n in ast.walk(e) if isinstance(n, ast.Name)} for c in values}
    crossed = any(other != name and name in read[other] for name in read for other in read)
    return None if crossed or not names or any(site.scope.shared(n) for n in names) else _Plan(values, branch)


def _returned(branch: ast.If, site: Site) -> _Plan | None:
    """`if t: return a` with `else: return b`, or with `return b` right behind."""
    block = site.source.block(branch)
    after = block[block.index(branch) + 1 :]
    last: ast.stmt = branch
    other = branch.orelse
    if not other:
        other = after[:1]
        last = after[0] if after else branch
    if len(branch.body) != 1 or len(other) != 1 or not site.source.alone(last):
        return None
    yes, no = branch.body[0], other[0]
    if not isinstance(yes, ast.Return) or not isinstance(no, ast.Return) or yes.value is None or no.value is None:
        return None
    return _Plan([_Choice(None, yes.value, no.value)], last)


def _assignments(body: list[ast.stmt]) -> dict[str, ast.expr] | None:
    """Name -> value where the block is plain assignments, each name once; None otherwise."""
    found: dict[str, ast.expr] = {}
    for statement in body:
        if isinstance(statement, ast.Pass):
            continue
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = statement.targets[0] if isinstance(statement, ast.Assign) and plain else None
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Name) or target.id in found:
            return None
        found[target.id] = statement.value
    return found


def _exchangeable(choice: _Choice, facts: Facts) -> bool:
    """Whether both values are tensors of one shape and dtype that may both be computed, at no risk for the gradient."""
    for value in (choice.yes, choice.no):
        if not facts.tensor(value) or not facts.pure(value, smooth=True):
            return False
    shape = facts.shape(choice.yes)
    same = shape is not None and shape == facts.shape(choice.no)
    return same and facts.casts(choice.yes) == facts.casts(choice.no)  # else both became the wider dtype


def _binding(plan: _Plan, test: str, site: Site) -> list[str]:
    several = len(plan.values) > 1
    name = site.scope.fresh("condition")
    lines = [f"{name} = {test}"] if several else []
    for choice in plan.values:
        yes, no = (
            ast.unparse(e) if not hasattr(e, "lineno") else site.source.segment(e) for e in (choice.yes, choice.no)
        )
        head = "return " if choice.name is None else f"{choice.name} = "
        lines.append(f"{head}{site.torch}.where({name if several else test}, {yes}, {no})")
    return lines


def _comments(site: Site, plan: _Plan) -> list[str]:
    start, end = site.source.whole_lines(site.statement, plan.last)
    return site.source.comments(start, end)


def in_test(site: Site, branch: ast.If) -> bool:
    inside = set(ast.walk(branch.test))
    return any(e in inside for e in site.expressions)


def is_elif(branch: ast.If, site: Site) -> bool:
    parent = site.source.parents[branch]
    return (
        isinstance(parent, ast.If)
        and parent.orelse == [branch]
        and site.source.text[site.source.span(branch)[0] :].startswith("elif")
    )


def bound_before(name: str, branch: ast.If, site: Site) -> bool:
    """Whether the name surely has a value before the branch: a parameter, or assigned before in a block around."""
    if name in site.scope.parameters:
        return True
    statement: ast.stmt = branch
    while True:
        block = site.source.block(statement)
        before = block[: block.index(statement)]
        if any(_binds(name, earlier) for earlier in before):
            return True
        above = site.source.parents[statement]
        if not isinstance(above, ast.stmt) or above is site.function:
            return False
        statement = above


def _binds(name: str, statement: ast.stmt) -> bool:
    """Whether the statement surely gives the name a value: an assignment, or a branch that does on both sides."""
    if isinstance(statement, ast.If):
        return all(any(_binds(name, inner) for inner in side) for side in (statement.body, statement.orelse))
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)
