"""What an `if` decides, with all its `elif`s: a value for each name, or what is returned. Nothing here is rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from optpass.auditing.fixes.site import Site

#: Values that one decision is between, at most: all of them are computed.
_MOST = 8


@dataclass(frozen=True)
class Choice:
    """A value that a branch decides; either side may be decided by a further branch."""

    test: ast.expr
    yes: Value
    no: Value


Value = ast.expr | Choice


@dataclass(frozen=True)
class Plan:
    """What an `if` decides, by name (None: what is returned), and the last statement that it reaches to."""

    values: dict[str | None, Choice]
    last: ast.stmt


def decided(node: ast.expr) -> Value:
    """An expression, `a if t else b` as a choice."""
    if isinstance(node, ast.IfExp):
        return Choice(node.test, decided(node.body), decided(node.orelse))
    return node


def leaves(value: Value) -> list[ast.expr]:
    """The values between which it is chosen."""
    return [*leaves(value.yes), *leaves(value.no)] if isinstance(value, Choice) else [value]


def tests(value: Value) -> list[ast.expr]:
    """The tests that it is chosen by, the first one first."""
    return [value.test, *tests(value.yes), *tests(value.no)] if isinstance(value, Choice) else []


def plan_of(branch: ast.If, site: Site) -> Plan | None:
    """What a branch decides, if that is all it does."""
    if not site.source.alone(branch):
        return None
    block: list[ast.stmt] = [branch] if is_elif(branch, site) else site.source.block(branch)
    block = block[block.index(branch) :]
    reached: list[ast.stmt] = []
    value = _returned(block, reached)
    if isinstance(value, Choice) and len(reached) <= _MOST:
        last = [s for s in block if any(node in reached for node in ast.walk(s))][-1]
        return Plan({None: value}, last) if site.source.alone(last) else None
    names = _assigned([branch], site)
    if not names:
        return None
    values: dict[str | None, Choice] = {name: v for name, v in names.items() if isinstance(v, Choice)}
    if len(values) < len(names) or any(site.scope.shared(name) for name in names) or _crossed(values):
        return None
    return Plan(values, branch)


def _returned(statements: list[ast.stmt], reached: list[ast.stmt]) -> Value | None:
    """What statements return that have nothing else to do; `reached` gets each `return` that one of the ways ends in.

    `if t: return a` is followed by `else: return b`, or by `return b` right behind, also behind a branch around it.
    """
    first = statements[0] if statements else None
    if isinstance(first, ast.Return) and first.value is not None:
        reached.append(first)
        return decided(first.value)
    if not isinstance(first, ast.If) or len(reached) > _MOST:
        return None
    yes = _returned([*first.body, *statements[1:]], reached)
    no = None if yes is None else _returned([*first.orelse, *statements[1:]], reached)
    return None if yes is None or no is None else Choice(first.test, yes, no)


def _assigned(body: list[ast.stmt], site: Site) -> dict[str, Value] | None:
    """Name -> value where the block is plain assignments, each name once, or one branch between such; else None."""
    if len(body) == 1 and isinstance(body[0], ast.If):
        return _between(body[0], site)
    found: dict[str, Value] = {}
    for statement in body:
        if isinstance(statement, ast.Pass):
            continue
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = statement.targets[0] if isinstance(statement, ast.Assign) and plain else None
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Name) or target.id in found:
            return None
        found[target.id] = decided(statement.value)
    return found


def _between(branch: ast.If, site: Site) -> dict[str, Value] | None:
    yes, no = _assigned(branch.body, site), _assigned(branch.orelse, site)
    if yes is None or no is None:
        return None
    found: dict[str, Value] = {}
    for name in [*yes, *(name for name in no if name not in yes)]:
        if not (name in yes and name in no) and not bound_before(name, branch, site):
            return None
        before = ast.Name(name, ast.Load())
        found[name] = Choice(branch.test, yes.get(name, before), no.get(name, before))
    return found


def _crossed(values: dict[str | None, Choice]) -> bool:
    """Whether a value reads another one that is decided too: made one behind the other, it would read the new one."""
    read = {name: {n.id for part in [*leaves(v), *tests(v)] for n in _names(part)} for name, v in values.items()}
    chosen = {name: {n.id for part in leaves(v) for n in _names(part)} for name, v in values.items()}
    tested = [test for v in values.values() for test in tests(v)]
    plain = len({id(test) for test in tested}) == 1  # the one test is made before any value
    return any(other != name and name in (chosen if plain else read)[other] for name in values for other in values)


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name))


def is_elif(branch: ast.If, site: Site) -> bool:
    """Whether it is written `elif`."""
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
