"""Checks of tensor values: made inside of the graph."""

from __future__ import annotations

import ast

from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.rewrites.branches import in_test
from optpass.auditing.fixes.rewrites.conditions import predicate, scalars_as_tensors
from optpass.auditing.fixes.rewrites.decisions import is_elif
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit


class AssertInGraph:
    """`if tensor: raise E("...")` -> `torch._assert_async(~tensor, "...")`."""

    name = "assert-async"
    note = "The check then raises RuntimeError; on a GPU it is a device-side assertion."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Replace the branch that only raises."""
        branch = site.statement
        if not isinstance(branch, ast.If) or branch.orelse or site.torch is None or not in_test(site, branch):
            return None
        if len(branch.body) != 1 or not site.source.alone(branch) or is_elif(branch, site) or site.function is None:
            return None
        message = _literal_message(branch.body[0])
        test = predicate(ast.UnaryOp(ast.Not(), branch.test), site, facts)
        if message is None or test is None or any(site.source.enclosing(branch, ast.Try)):
            return None
        test = test.removeprefix("~~")
        source = site.source
        indent = source.indent(branch)
        comments = source.comments(*source.whole_lines(branch, branch))
        lines = [*comments, f"{site.torch}._assert_async({test}, {message})"]
        text = "".join(f"{indent}{line}{source.newline}" for line in lines)
        return [*site.torch_import(), Edit(*source.whole_lines(branch, branch), text)]


class AssertTensor:
    """`assert t.item() > 0` -> `assert t > 0`, which Dynamo makes an assertion in the graph."""

    name = "assert-tensor"
    note = "On a GPU the check is a device-side assertion."

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Leave the conversions to Python numbers out of the test."""
        check = site.statement
        if not isinstance(check, ast.Assert) or not (check.msg is None or isinstance(check.msg, ast.Constant)):
            return None
        if not scalars_as_tensors(check.test, site, facts):
            return None
        test = predicate(check.test, site, facts)
        return None if test is None else [site.replace(check.test, test)]


def _literal_message(statement: ast.stmt) -> str | None:
    """The message of `raise E("...")` as a literal; the exception's name where it has none."""
    if not isinstance(statement, ast.Raise) or statement.cause is not None:
        return None
    raised = statement.exc
    if isinstance(raised, ast.Name):
        return repr(raised.id)
    if not isinstance(raised, ast.Call) or raised.keywords or len(raised.args) > 1:
        return None
    if not raised.args:
        return repr(ast.unparse(raised.func))
    first = raised.args[0]
    return ast.unparse(first) if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
