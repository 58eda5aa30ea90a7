"""A source file as text and as a syntax tree, and edits of spans of it. Knows nothing of graph breaks.

Edits replace spans of the text, so that formatting and comments outside them stay as the user wrote them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_BREAK = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, order=True)
class Edit:
    """Replace `text[start:end]` by `text`. `start == end` inserts."""

    start: int
    end: int
    text: str


class Source:
    """One file.

    Args:
        text: the file's text with its own line endings (read it with `newline=""`).

    Raises:
        SyntaxError: the text is not Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text.removeprefix("\ufeff"))
        self._bom = len(text) - len(text.removeprefix("\ufeff"))
        self.newline = "\r\n" if "\r\n" in text else "\n"

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in _BREAK.finditer(self.text))]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node above each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def line(self, number: int) -> str:
        """Line `number`, from 1, without its ending."""
        start = self._starts[number - 1]
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def line_start(self, number: int) -> int:
        """Offset of the first character of line `number`; the text's length behind the last line."""
        return self._starts[number - 1] if number <= len(self._starts) else len(self.text)

    def offset(self, line: int, column: int) -> int:
        """Offset of a position as `ast` gives it: line from 1, column in UTF-8 bytes from 0."""
        lead = self._bom if line == 1 else 0
        prefix = self.line(line)[lead:].encode()[:column].decode(errors="ignore")
        return self._starts[line - 1] + lead + len(prefix)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Offsets of a node's text."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The node's text as written."""
        start, end = self.span(node)
        return self.text[start:end]

    def rewritten(self, node: ast.expr | ast.stmt, replacements: Mapping[ast.expr, str]) -> str:
        """The node's text with some of the expressions in it replaced."""
        start, _ = self.span(node)
        edits = [Edit(a - start, b - start, new) for old, new in replacements.items() for a, b in [self.span(old)]]
        return apply_edits(self.segment(node), edits)

    def indent(self, statement: ast.stmt) -> str:
        """White space before the statement; only meaningful where it begins its line."""
        line = self.line(statement.lineno).removeprefix("\ufeff")
        return line[: len(line) - len(line.lstrip())]

    @cached_property
    def unit(self) -> str:
        """One step of indentation in this file."""
        for node in ast.walk(self.tree):
            for body in blocks(node):
                if isinstance(node, ast.stmt) and body[0].lineno > node.lineno:
                    inner, outer = self.indent(body[0]), self.indent(node)
                    if inner.startswith(outer) and inner != outer:
                        return inner[len(outer) :]
        return "    "

    def alone(self, statement: ast.stmt) -> bool:
        """Whether nothing but a comment shares the statement's lines."""
        start, end = self.span(statement)
        assert statement.end_lineno is not None
        before = self.text[self.line_start(statement.lineno) : start].removeprefix("\ufeff")
        after = self.text[end : self.line_start(statement.end_lineno + 1)].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def row(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of a block that share lines with this one, divided by `;`; itself alone where there is none.

        Empty where something else shares these lines.
        """
        block = self.block(statement)
        first = last = block.index(statement)
        while first > 0 and block[first - 1].end_lineno == block[first].lineno:
            first -= 1
        while last + 1 < len(block) and block[last + 1].lineno == block[last].end_lineno:
            last += 1
        start, (_, end) = self.line_start(block[first].lineno), self.span(block[last])
        before = self.text[start : self.span(block[first])[0]].removeprefix("\ufeff")
        after = self.text[end : self.line_start((block[last].end_lineno or 0) + 1)].strip().removeprefix(";").strip()
        return [] if before.strip() or (after and not after.startswith("#")) else block[first : last + 1]

    def whole_lines(self, first: ast.stmt, last: ast.stmt) -> tuple[int, int]:
        """Offsets of all lines from one statement to another, the last line's ending included."""
        assert last.end_lineno is not None
        return self.line_start(_first_line(first)), self.line_start(last.end_lineno + 1)

    def indented(self, first: ast.stmt, last: ast.stmt, by: str) -> str:
        """The statements' lines with `by` put before each, lines inside of string literals left alone."""
        start, end = self.whole_lines(first, last)
        inside = {
            number
            for node in ast.walk(self.tree)
            if isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
            for number in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        }
        lines = _lines(self.text[start:end])
        numbers = range(_first_line(first), _first_line(first) + len(lines))
        return "".join(
            line if number in inside or not line.strip() else by + line
            for number, line in zip(numbers, lines, strict=True)
        )

    def comments(self, start: int, end: int) -> list[str]:
        """The comments in a span, in order."""
        lines = io.StringIO(self.text[start:end]).readline
        found = []
        try:
            for token in tokenize.generate_tokens(lines):
                if token.type == tokenize.COMMENT:
                    found.append(token.string)
        except (tokenize.TokenError, IndentationError):
            pass  # a span need not be a whole program; what was read so far stands
        return found

    def enclosing(self, node: ast.AST, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """The nodes above, innermost first, of the given kinds (all without any)."""
        current = self.parents.get(node)
        while current is not None:
            if not kinds or isinstance(current, kinds):
                yield current
            current = self.parents.get(current)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The statement that the node belongs to."""
        if isinstance(node, ast.stmt):
            return node
        return next((above for above in self.enclosing(node) if isinstance(above, ast.stmt)), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that this one stands in."""
        parent = self.parents[statement]
        return next(body for body in blocks(parent) if statement in body)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly under a node."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made. They must not overlap; insertions at one place keep their order."""
    parts, position = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        if edit.start < position:
            raise ValueError(f"edits overlap at offset {edit.start}")
        parts += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, text[position:]])


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _lines(text: str) -> list[str]:
    pieces, position = [], 0
    for match in _BREAK.finditer(text):
        pieces.append(text[position : match.end()])
        position = match.end()
    return [*pieces, text[position:]] if position < len(text) else pieces
