"""Symbolic dimensions: from names such as "batch" or "past + 1" to ints.

Here: which symbols a model has, what the user bound them to, and small arithmetic over them. Not here: shapes of
intermediate values.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from optpass.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import onnx

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "Max": max, "min": min, "Min": min}
#: Longest expression evaluated: longer ones are the exporter's own guards, not a size.
_LONGEST = 500


class Dims:
    """What every symbolic dimension of the graph's inputs stands for.

    Args:
        graph: the main graph; a dimension without a name is called "<input>.<axis>".
        bound: sizes the user gave by name.
        where: of the file, for error messages.

    Raises:
        ConfigError: a bound name is no symbol of the model, or its size is negative or no int.
    """

    def __init__(self, graph: onnx.GraphProto, bound: Mapping[str, int], where: str) -> None:
        self.names = _symbols(graph)
        self.assumed: list[str] = []
        for name, size in bound.items():
            if name not in self.names:
                raise ConfigError(
                    f"{where}: has no symbolic dimension {name!r}; {did_you_mean(name, sorted(self.names))}"
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ConfigError(f"{where}: dimension {name!r} cannot be {size!r}; give a whole number, 0 or more")
        self.values = dict(bound)

    def size(self, dim: onnx.TensorShapeProto.Dimension, default_name: str) -> int:
        """The size of a dimension of an input; a symbol nobody bound is 1 and is listed in `assumed`."""
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            return int(dim.dim_value)
        text = dim.dim_param or default_name
        if text not in self.values:
            found = evaluate(text, self._symbol) if dim.dim_param else None
            self.values[text] = found if found is not None else self._symbol(text)
        return self.values[text]

    def known(self, dim: onnx.TensorShapeProto.Dimension) -> int | None:
        """The size of a dimension of an intermediate value, where its symbols are known; never assumes."""
        if dim.HasField("dim_value"):
            return int(dim.dim_value) if dim.dim_value >= 0 else None
        if not dim.dim_param:
            return None
        return self.values.get(dim.dim_param, evaluate(dim.dim_param, self.values.get))

    def _symbol(self, name: str) -> int:
        if name not in self.values:
            self.values[name] = 1
            self.assumed.append(name)
        return self.values[name]


def _symbols(graph: onnx.GraphProto) -> set[str]:
    stored = {t.name for t in graph.initializer}
    found: set[str] = set()
    for value in graph.input:
        if value.name in stored or not value.type.HasField("tensor_type"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                continue
            found.update(_names(dim.dim_param) if dim.dim_param else {f"{value.name}.{axis}"})
    return found


def _names(text: str) -> set[str]:
    """The symbols of an expression, or the text itself where it is none."""
    tree = _parse(text)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(_FUNCTIONS) if tree else {text}


def _parse(text: str) -> ast.Expression | None:
    if len(text) > _LONGEST or not re.search(r"[-+*/%(]", text):
        return None
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if all(_allowed(node) for node in ast.walk(tree.body)) else None


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    kinds = (ast.Name, ast.BinOp, ast.Call, ast.UnaryOp, ast.USub, ast.Load)
    return isinstance(node, (*kinds, *_OPERATORS)) and (
        not isinstance(node, ast.Call) or isinstance(node.func, ast.Name)
    )


def evaluate(text: str, lookup: Callable[[str], int | None]) -> int | None:
    """The value of an arithmetic expression over symbols; None if it is none, or a symbol is not known.

    >>> evaluate("past + 2*seq", {"past": 3, "seq": 4}.get)
    11
    """
    tree = _parse(text)
    if tree is None:
        return lookup(text) if text.isidentifier() else None
    try:
        return _fold(tree.body, lookup)
    except (_UnknownSymbol, ZeroDivisionError):
        return None


class _UnknownSymbol(Exception):
    """A symbol that nothing is known of."""


def _fold(node: ast.expr, lookup: Callable[[str], int | None]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_fold(node.left, lookup), _fold(node.right, lookup))
    if isinstance(node, ast.UnaryOp):
        return -_fold(node.operand, lookup)
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and node.args:
        return _FUNCTIONS[node.func.id](*list(_each(node.args, lookup)))
    value = lookup(node.id) if isinstance(node, ast.Name) else None
    if value is None:
        raise _UnknownSymbol(ast.dump(node))
    return value


def _each(nodes: list[ast.expr], lookup: Callable[[str], int | None]) -> Iterator[int]:
    for node in nodes:
        yield _fold(node, lookup)
