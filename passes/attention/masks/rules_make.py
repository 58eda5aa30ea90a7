"""Elements of tensors that are made: ranges, fills, triangles, identities, running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optpass.passes.attention.masks import numbers
from optpass.passes.attention.masks.elements import Elements, Index, UnknownError
from optpass.passes.attention.masks.integers import Int
from optpass.passes.attention.masks.pieces import Expr, where
from optpass.passes.attention.masks.predicates import eq, ge
from optpass.passes.attention.program.ir import Value, arg


def typed(engine: Elements, number: Any, dtype: torch.dtype) -> Expr:
    """A Python or symbolic number as an element of `dtype`."""
    found = engine.number(number)
    if isinstance(found, bool):
        return engine.cast(found, torch.bool, dtype)
    source = torch.float64 if isinstance(found, float) else torch.int64
    return engine.cast(found, source, dtype)


def _filled(argument: str) -> Callable[[Elements, Value, Index], Expr]:
    def rule(engine: Elements, value: Value, index: Index) -> Expr:
        number = arg(value, argument)
        if isinstance(number, Value):
            return engine.cast(engine.element(number, ()), number.dtype, value.dtype)
        return typed(engine, number, value.dtype)

    return rule


def _of(number: int) -> Callable[[Elements, Value, Index], Expr]:
    return lambda engine, value, index: typed(engine, number, value.dtype)


def _arange(engine: Elements, value: Value, index: Index) -> Expr:
    start, step = (_whole(engine, arg(value, name), default) for name, default in (("start", 0), ("step", 1)))
    if not isinstance(step, int):
        raise UnknownError
    found = start + index[0] * step
    # Ranges of floats are computed as start + i * step in double precision: exact for whole numbers that fit.
    if not numbers.exact(found, value.dtype):
        raise UnknownError
    return numbers.tidy(found) if value.dtype in numbers.DIGITS else found


def _whole(engine: Elements, number: Any, default: int) -> Int:
    if number is None:
        return default
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise UnknownError
    return engine.sizes.form(number)


def _triangle(lower: bool) -> Callable[[Elements, Value, Index], Expr]:
    def rule(engine: Elements, value: Value, index: Index) -> Expr:
        matrix, diagonal = value.args[0], engine.sizes.form(value.args[1])
        below = index[-2] + diagonal - index[-1]  # >= 0 on and below the diagonal
        inside = engine.element(matrix, index)
        return where(ge(below) if lower else ge(-below), inside, typed(engine, 0, value.dtype))

    return rule


def _eye(engine: Elements, value: Value, index: Index) -> Expr:
    return engine.cast(eq(index[0] - index[1]), torch.bool, value.dtype)


def _cumsum(engine: Elements, value: Value, index: Index) -> Expr | None:
    """Of one number repeated: its multiples."""
    if value.dim == 0:
        return None
    source, dim = value.args[0], value.args[1] % value.dim
    size = engine.sizes.form(source.shape[dim])
    place = engine.atoms.axis("summed", size)
    each = engine.element(source, (*index[:dim], place, *index[dim + 1 :]))
    if not isinstance(each, (bool, int, float)) or not float(each).is_integer():
        return None
    total = (index[dim] + 1) * int(each)
    if not numbers.exact(total, value.dtype):
        return None
    return numbers.tidy(total) if value.dtype in numbers.DIGITS else total


RULES: dict[str, Callable[[Elements, Value, Index], Expr | None]] = {
    "full": _filled("fill_value"),
    "full_like": _filled("fill_value"),
    "new_full": _filled("fill_value"),
    "fill": _filled("value"),
    "scalar_tensor": _filled("s"),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _of(1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _of(0)),
    "arange": _arange,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
    "eye": _eye,
    "cumsum": _cumsum,
}
