"""Calls that only tell somebody something: kept out of what is compiled, with what is computed for them alone."""

from __future__ import annotations

import ast
import re

from optpass.auditing.fixes import tables
from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites.conditions import predicate
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

_LOGGER = re.compile(r"(?i)_*(log|logger|logging)_*$")
_MAKERS = ("getLogger", "get_logger", "getLoggerClass")


class GuardTelling:
    """`print(...)` under `if not torch.compiler.is_compiling():`, with its neighbours and the values made for it."""

    name = "guard"
    note = "What stands under the guard does not run in compiled calls."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Guard the call that the break is in, or the assignment whose value only such calls use."""
        statement = site.statement
        if site.function is None or _in_handler(site):
            return None
        if not _guardable(statement, facts) and not _for_telling(statement, facts):
            return None
        above = site.source.parents.get(statement)
        if isinstance(above, ast.If) and above.lineno == statement.lineno:
            return _skipped(above, site, facts)  # `if verbose: print(x)` has no lines to put under a guard
        edits: list[Edit] = []
        done: list[ast.stmt] = []
        waiting = [statement]
        while waiting:
            current = waiting.pop()
            if current in done or _compile_free(current, site):
                continue
            if site.source.alone(current):
                group = _run(current, site, facts)
                more = site.guarded(group[0], group[-1])
            else:
                group = [s for s in site.source.row(current) if _guardable(s, facts) or _for_telling(s, facts)]
                more = site.guarded_in_row(group) if current in group else None
            if more is None:
                return None
            edits += more
            done += group
            waiting += _users({name for member in group for name in _assigned(member)}, facts)
        return edits


class GuardTellingBranch:
    """`if tensor: print(...)`: the test too is only made when not compiling."""

    name = "guard-branch"
    note = "The branch is not looked at in compiled calls."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Put `not torch.compiler.is_compiling() and` before the test of an `if` that only tells."""
        if not isinstance(site.statement, ast.If) or site.function is None or _in_handler(site):
            return None
        return _skipped(site.statement, site, facts)


class GuardMessage:
    """`assert condition, f"{tensor}"`: checked only when not compiling, as the message needs the value."""

    name = "guard-assert"
    note = "The assertion is not checked in compiled calls."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Guard an assertion that cannot be made in a graph."""
        check = site.statement
        if not isinstance(check, ast.Assert) or site.function is None or check.msg is None or _in_handler(site):
            return None
        if isinstance(check.msg, ast.Constant) or not (facts.harmless(check.test) and facts.harmless(check.msg)):
            return None
        if predicate(check.test, site, facts) is None:
            return None  # a check of shapes, say, which costs nothing and must stay
        return site.guarded(check, check)


def _skipped(branch: ast.If, site: Site, facts: Facts) -> list[Edit] | None:
    """The test of an `if` that only tells, made only when not compiling."""
    if branch.orelse or site.torch is None:
        return None
    if not facts.harmless(branch.test) or not all(_guardable(s, facts) for s in branch.body):
        return None
    test = site.source.segment(branch.test)
    whole = isinstance(branch.test, ast.BoolOp) and isinstance(branch.test.op, ast.Or)
    loose = whole or isinstance(branch.test, ast.IfExp | ast.Lambda | ast.NamedExpr)
    if _parenthesised(site, branch.test):
        loose = False
    new = f"not {site.torch}.compiler.is_compiling() and {f'({test})' if loose else test}"
    start, end = _with_parentheses(site, branch.test)
    text = site.source.text[start:end]
    new = f"not {site.torch}.compiler.is_compiling() and {text}" if text != test else new
    return [*site.torch_import(), Edit(start, end, new)]


def telling(call: ast.expr, facts: Facts) -> bool:
    """Whether the expression is a call that only tells, waits or frees, all of whose arguments can be left out."""
    if not isinstance(call, ast.Call):
        return False
    dotted = facts.scope.dotted(call.func)
    known = dotted in tables.TELLING
    if not known and isinstance(call.func, ast.Attribute):
        known = call.func.attr in tables.WRITER_METHODS
        known |= call.func.attr in tables.LOGGER_METHODS and _logger(call.func.value, facts)
    into_file = any(
        k.arg == "file" and facts.scope.dotted(k.value) not in ("sys.stderr", "sys.stdout") for k in call.keywords
    )
    arguments = [*call.args, *(k.value for k in call.keywords)]
    return known and not into_file and all(facts.harmless(a) for a in arguments)


def _logger(node: ast.expr, facts: Facts) -> bool:
    """Whether the expression is a logger: made by `getLogger`, or called log or logger."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute | ast.Name) and _last(node.func) in _MAKERS
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Name):
        values = facts.scope.module.assigned.get(node.id, [])
    made = [value for value in values if isinstance(value, ast.Call) and _last(value.func) in _MAKERS]
    return bool(made) or _LOGGER.search(_last(node)) is not None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _guardable(statement: ast.stmt, facts: Facts) -> bool:
    return isinstance(statement, ast.Expr) and telling(statement.value, facts)


def _for_telling(statement: ast.stmt, facts: Facts) -> bool:
    """Whether the statement makes a value, harmlessly, that only guarded statements use."""
    names = _assigned(statement)
    if not names or not isinstance(statement, ast.Assign) or not facts.harmless(statement.value):
        return False
    return all(_only_told(name, facts, ()) for name in names)


def _only_told(name: str, facts: Facts, above: tuple[str, ...]) -> bool:
    """Whether every use of a local is in a telling statement, or in an assignment that is itself only told."""
    scope = facts.scope
    if name in scope.parameters or scope.shared(name) or name in above:
        return False
    stores = [facts.site.source.statement(s) for s in scope.stores(name)]
    if len(stores) != 1 or not all(isinstance(s, ast.Assign) and facts.harmless(s.value) for s in stores):
        return False
    for load in scope.loads(name):
        user = facts.site.source.statement(load)
        if user is None or _handler(facts.site, user):
            return False
        if not _guardable(user, facts):
            inner = _assigned(user)
            told = isinstance(user, ast.Assign) and bool(inner) and facts.harmless(user.value)
            if not told or not all(_only_told(n, facts, (*above, name)) for n in inner):
                return False
    return bool(scope.loads(name))


def _users(names: set[str], facts: Facts) -> list[ast.stmt]:
    """Statements that use the names, and those that use what these assign."""
    found: list[ast.stmt] = []
    waiting = sorted(names)
    while waiting:
        for load in facts.scope.loads(waiting.pop()):
            user = facts.site.source.statement(load)
            if user is not None and user not in found:
                found.append(user)
                waiting += sorted(_assigned(user))
    return found


def _assigned(statement: ast.stmt) -> set[str]:
    """Names of a plain assignment; empty for anything else."""
    if not isinstance(statement, ast.Assign) or not all(isinstance(t, ast.Name) for t in statement.targets):
        return set()
    return {t.id for t in statement.targets if isinstance(t, ast.Name)}


def _run(statement: ast.stmt, site: Site, facts: Facts) -> list[ast.stmt]:
    """The statement with the neighbours that can go under the same guard."""
    block = site.source.block(statement)
    first = last = block.index(statement)
    while first > 0 and _joins(block[first - 1], site, facts):
        first -= 1
    while last + 1 < len(block) and _joins(block[last + 1], site, facts):
        last += 1
    return block[first : last + 1]


def _joins(statement: ast.stmt, site: Site, facts: Facts) -> bool:
    return site.source.alone(statement) and (_guardable(statement, facts) or _for_telling(statement, facts))


def _compile_free(statement: ast.stmt, site: Site) -> bool:
    """Whether the statement already stands under a test of `is_compiling`."""
    tests = [ast.unparse(a.test) for a in site.source.enclosing(statement, ast.If) if isinstance(a, ast.If)]
    return any("is_compiling" in test for test in tests)


def _in_handler(site: Site) -> bool:
    return _handler(site, site.statement)


def _handler(site: Site, statement: ast.stmt) -> bool:
    """Whether the statement is in an `except`: what it says there is about a failure and must be said."""
    return next(site.source.enclosing(statement, ast.ExceptHandler), None) is not None


def _with_parentheses(site: Site, node: ast.expr) -> tuple[int, int]:
    start, end = site.source.span(node)
    text = site.source.text
    while True:
        before, after = text[:start].rstrip(" \t"), text[end:]
        after_at = len(text) - len(after.lstrip(" \t"))
        if not before.endswith("(") or after_at >= len(text) or text[after_at] != ")":
            return start, end
        start, end = len(before) - 1, after_at + 1


def _parenthesised(site: Site, node: ast.expr) -> bool:
    return _with_parentheses(site, node) != site.source.span(node)
