"""The place of a graph break in the user's syntax tree, and the edits that many rewrites need there."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from optpass.auditing.fixes.scope import Module, Scope
from optpass.auditing.fixes.source import Edit, Function, Source
from optpass.reporting.audit.model import Break

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Site:
    """Where a break is.

    Attributes:
        exact: `expressions` is the one expression that Dynamo stopped at, or that in the user's file which led there.
        expressions: those it can be, outermost first.
        assumed: names to take for tensors: proved elsewhere, or numbers that a rewrite is about to make tensors.
    """

    source: Source
    scope: Scope
    gb_type: str
    statement: ast.stmt
    expressions: tuple[ast.expr, ...]
    exact: bool
    assumed: frozenset[str] = frozenset()

    @property
    def function(self) -> Function | None:
        """The function that the break is in."""
        return self.scope.function

    @property
    def branching(self) -> bool:
        """Dynamo stopped because Python wanted a tensor's truth."""
        return "data-dependent" in self.gb_type.lower() and "branch" in self.gb_type.lower()

    @cached_property
    def torch(self) -> str | None:
        """What to call torch at this place; None where the name means something else here."""
        name = self.scope.module.torch or "torch"
        resolved = self.scope.dotted(ast.Name(name, ast.Load()))
        if self.scope.module.torch:
            return name if resolved == "torch" else None
        return name if resolved is None and not self._bound_somewhere(name) else None

    def torch_import(self) -> list[Edit]:
        """The edit that imports torch, if the module does not."""
        return [] if self.scope.module.torch else [self.after_imports(f"import {self.torch}")]

    def after_imports(self, line: str) -> Edit:
        """Insert a line behind the imports at the top of the module."""
        source = self.source
        last: ast.stmt | None = None
        for index, statement in enumerate(source.tree.body):
            docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if isinstance(statement, ast.Import | ast.ImportFrom) or (docstring and last is None):
                last = statement
            elif not isinstance(statement, ast.If | ast.Try):  # those may be guarded imports; others end the imports
                break
        if last is None:
            return Edit(source.line_start(1), source.line_start(1), line + source.newline)
        assert last.end_lineno is not None
        at = source.line_start(last.end_lineno + 1)
        lead = "" if source.text[:at].endswith(("\n", "\r")) else source.newline
        return Edit(at, at, f"{lead}{line}{source.newline}")

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """Replace a node's text."""
        return Edit(*self.source.span(node), text)

    def guarded(self, first: ast.stmt, last: ast.stmt) -> list[Edit] | None:
        """Put neighbours of one block under `if not torch.compiler.is_compiling():`; None where that cannot be."""
        source = self.source
        block = source.block(first)
        group = block[block.index(first) : block.index(last) + 1]
        if self.torch is None or not all(source.alone(statement) for statement in group):
            return None
        start, end = source.whole_lines(first, last)
        head = f"{source.indent(first)}if not {self.torch}.compiler.is_compiling():{source.newline}"
        return [*self.torch_import(), Edit(start, end, head + source.indented(first, last, source.unit))]

    def guarded_in_row(self, chosen: list[ast.stmt]) -> list[Edit] | None:
        """Give each of the statements on a line one of its own, some of them under such a guard."""
        source = self.source
        row = source.row(chosen[0])
        if self.torch is None or len(row) < 2 or not all(statement in row for statement in chosen):
            return None
        indent, lines = source.indent(row[0]), list(source.comments(*source.whole_lines(row[0], row[-1])))
        for before, statement in zip([None, *row], row, strict=False):
            guarded = statement in chosen
            if guarded and before not in chosen:
                lines.append(f"if not {self.torch}.compiler.is_compiling():")
            lines.append(source.unit * guarded + source.segment(statement))
        text = "".join(f"{indent}{line}{source.newline}" for line in lines)
        return [*self.torch_import(), Edit(*source.whole_lines(row[0], row[-1]), text)]

    def _bound_somewhere(self, name: str) -> bool:
        return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(self.source.tree))


def locate(brk: Break, source: Source) -> Site | None:
    """The break's place in the user's file; None if the text has no such place."""
    own = brk.owner == "user" or brk.user_line is None
    line = brk.line if own else brk.user_line
    begin, end_line, end = (
        (brk.column, brk.end_line, brk.end_column) if own else (brk.user_column, brk.user_end_line, brk.user_end_column)
    )
    column = begin - 1 if begin else None
    assert line is not None
    if not 1 <= line <= len(source.text.splitlines()) + 1:
        return None
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.expr | ast.stmt)]
    found: list[ast.expr | ast.stmt] = []
    if column is not None:
        begins = [node for node in nodes if (node.lineno, node.col_offset) == (line, _in_bytes(source, line, column))]
        last = min(end_line or line, len(source.text.splitlines()))
        ends = None if end is None else (last, _in_bytes(source, last, end - 1))
        found = [node for node in begins if (node.end_lineno, node.end_col_offset) == ends] or begins
    if not found:
        found = [node for node in nodes if isinstance(node, ast.stmt) and line in _header_lines(node)]
        found = found[-1:]  # `ast.walk` goes downwards: the innermost
    if not found:
        return None
    statement = source.statement(found[0])
    if statement is None:
        return None
    expressions = _outermost_first([node for node in found if isinstance(node, ast.expr)])
    exact = bool(expressions) and (len(expressions) == 1 or _same_end(expressions))
    if not expressions:
        expressions = _header_expressions(statement)
        exact = len(expressions) == 1 and isinstance(statement, ast.If | ast.While)
        if column is None:
            expressions = [e for top in expressions for e in ast.walk(top) if isinstance(e, ast.expr)]
    function = next((node for node in source.enclosing(found[0], *_FUNCTIONS)), None)
    assert function is None or isinstance(function, _FUNCTIONS)
    return Site(source, Scope(Module(source), function), brk.gb_type, statement, tuple(expressions), exact)


def _in_bytes(source: Source, line: int, characters: int) -> int:
    """A column as `ast` counts it."""
    return len(source.line(line)[:characters].encode())


def _header_lines(statement: ast.stmt) -> range:
    """Lines of a statement, of a compound one without what stands indented under it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Try):
        return range(0)
    body = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    if isinstance(body, list) and body:
        end = max([statement.lineno, *(e.end_lineno or 0 for e in _header_expressions(statement))])
    return range(statement.lineno, end + 1)


def _header_expressions(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.With | ast.AsyncWith):
        return [item.context_expr for item in statement.items]
    return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)]


def _outermost_first(expressions: list[ast.expr]) -> list[ast.expr]:
    return sorted(expressions, key=lambda e: (e.end_lineno or 0, e.end_col_offset or 0), reverse=True)


def _same_end(expressions: list[ast.expr]) -> bool:
    return len({(e.end_lineno, e.end_col_offset) for e in expressions}) == 1
