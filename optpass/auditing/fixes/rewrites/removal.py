"""Statements that have no place in a compiled function: taken out."""

from __future__ import annotations

import ast

from optpass.auditing.fixes.facts import Facts
from optpass.auditing.fixes.site import Site
from optpass.auditing.fixes.source import Edit

_REMOVED = frozenset(
    "torch._dynamo.graph_break builtins.breakpoint pdb.set_trace ipdb.set_trace pudb.set_trace "
    "torch.distributed.breakpoint IPython.embed".split()
)


class RemoveStatement:
    """`torch._dynamo.graph_break()`, `breakpoint()`, `pdb.set_trace()`: removed."""

    name = "remove"
    note = ""

    def edits(self, site: Site, facts: Facts) -> list[Edit] | None:
        """Remove the statement's lines, or put `pass` where it is the only one of its block."""
        statement = site.statement
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
            return None
        call = statement.value
        pdb = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call) and (
            facts.scope.dotted(call.func.value.func) == "pdb.Pdb"
        )  # fmt: skip
        if facts.scope.dotted(call.func) not in _REMOVED and not pdb:
            return None
        block = site.source.block(statement)
        if len(block) == 1:
            return [site.replace(statement, "pass")]
        if site.source.alone(statement):
            return [Edit(*site.source.whole_lines(statement, statement), "")]
        start, end = site.source.span(statement)
        index = block.index(statement)
        if index + 1 < len(block) and block[index + 1].lineno == statement.end_lineno:  # `breakpoint(); y = x`
            return [Edit(start, site.source.span(block[index + 1])[0], "")]
        if index > 0 and block[index - 1].end_lineno == statement.lineno:
            return [Edit(site.source.span(block[index - 1])[1], end, "")]
        return None
