"""Elements of what works element by element: casts, choices, logic, comparisons, arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

import torch

from optpass.passes.attention.masks import numbers
from optpass.passes.attention.masks.elements import Elements, Index, UnknownError
from optpass.passes.attention.masks.pieces import Expr, Leaf, lift, where
from optpass.passes.attention.masks.predicates import Bool, Pred, all_of, any_of, choose, negate
from optpass.passes.attention.masks.rules_make import typed
from optpass.passes.attention.program.ir import Value, arg

Rule: TypeAlias = Callable[[Elements, Value, Index], Expr | None]


def _tensor(engine: Elements, value: Value, operand: Any, index: Index, dtype: torch.dtype) -> Expr:
    """An operand as a number of `dtype`; Python numbers must have one rounding only."""
    if isinstance(operand, Value):
        return engine.cast(engine.operand(value, operand, index), operand.dtype, dtype)
    return typed(engine, operand, dtype)


def _same(engine: Elements, value: Value, index: Index) -> Expr:
    source: Value = value.args[0]
    return engine.cast(engine.element(source, index), source.dtype, value.dtype)


def _copy(engine: Elements, value: Value, index: Index) -> Expr:
    return _tensor(engine, value, value.args[1], index, value.dtype)


# ---- choices --------------------------------------------------------------------------------------------------------


def _where(engine: Elements, value: Value, index: Index) -> Expr:
    chosen = _proposition(engine, value, value.args[0], index)
    return where(chosen, *(_tensor(engine, value, operand, index, value.dtype) for operand in value.args[1:3]))


def _masked_fill(engine: Elements, value: Value, index: Index) -> Expr:
    source, mask, fill = value.args[:3]
    chosen = _proposition(engine, value, mask, index)
    return where(chosen, *(_tensor(engine, value, operand, index, value.dtype) for operand in (fill, source)))


def _proposition(engine: Elements, value: Value, operand: Any, index: Index) -> Bool:
    found = _tensor(engine, value, operand, index, torch.bool)
    assert isinstance(found, (bool, Pred))
    return found


def _logic(join: Callable[[Bool, Bool], Bool], only_bool: bool) -> Rule:
    def rule(engine: Elements, value: Value, index: Index) -> Expr | None:
        if only_bool and value.dtype != torch.bool:
            return None
        one, other = (_proposition(engine, value, operand, index) for operand in value.args[:2])
        return join(one, other)

    return rule


def _not(engine: Elements, value: Value, index: Index) -> Expr | None:
    if value.dtype != torch.bool:
        return None
    return negate(_proposition(engine, value, value.args[0], index))


def _and(p: Bool, q: Bool) -> Bool:
    return all_of((p, q))


def _or(p: Bool, q: Bool) -> Bool:
    return any_of((p, q))


def _xor(p: Bool, q: Bool) -> Bool:
    return choose(p, negate(q), q)


# ---- comparisons ----------------------------------------------------------------------------------------------------


def _comparison(name: str) -> Rule:
    def rule(engine: Elements, value: Value, index: Index) -> Expr | None:
        x, y = value.args[:2]
        dtype = _common(_kind(x), _kind(y))
        if any(len(_readings(operand, dtype)) > 1 for operand in (x, y)):
            return None
        dtype = torch.int64 if dtype == torch.bool else dtype
        one, other = (_tensor(engine, value, operand, index, dtype) for operand in (x, y))
        return engine.compare(name, one, other, dtype)

    return rule


def _kind(operand: Any) -> Any:
    """What type promotion asks of an operand: dtype and whether it has dims, or the type of a Python number."""
    if isinstance(operand, Value):
        return operand.dtype, operand.dim > 0
    return int if isinstance(operand, torch.SymInt) else float if isinstance(operand, torch.SymFloat) else type(operand)


@lru_cache(maxsize=256)
def _common(x: Any, y: Any) -> torch.dtype:
    """The dtype that two operands are computed in."""

    def stand_in(kind: Any) -> Any:
        return torch.empty((0,) * kind[1], dtype=kind[0], device="cpu") if isinstance(kind, tuple) else kind(1)

    return torch.result_type(stand_in(x), stand_in(y))


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _binary(name: str) -> Rule:
    def rule(engine: Elements, value: Value, index: Index) -> Expr | None:
        x, y = value.args[:2]
        if value.dtype == torch.bool:
            return _of_bools(name, engine, value, index)
        rounding = {"floor": "floor_divide", "trunc": "trunc"}.get(arg(value, "rounding_mode") or "", name)
        readings = product(_readings(x, value.dtype), _readings(y, value.dtype))
        found = {_apply(engine, value, rounding, a, b, index) for a, b in readings}
        return found.pop() if len(found) == 1 else None

    return rule


def _readings(operand: Any, dtype: torch.dtype) -> list[Any]:
    """The numbers that a kernel may take a Python number for."""
    plain = isinstance(operand, (int, float)) and not isinstance(operand, bool)
    return numbers.scalars(float(operand), dtype) if plain and dtype in numbers.DIGITS else [operand]


def _apply(engine: Elements, value: Value, name: str, x: Any, y: Any, index: Index) -> Expr:
    a, b = (_as_operand(engine, value, operand, index) for operand in (x, y))
    alpha = arg(value, "alpha")
    if alpha not in (None, 1):  # add: a + alpha·b, sub: a - alpha·b, rsub: b - alpha·a
        if value.dtype not in numbers.RANGES:
            raise UnknownError
        factor = typed(engine, alpha, value.dtype)
        a = engine.arithmetic("mul", a, factor, value.dtype) if name == "rsub" else a
        b = engine.arithmetic("mul", b, factor, value.dtype) if name != "rsub" else b
    if name == "rsub":
        name, a, b = "sub", b, a
    if name == "trunc":
        if value.dtype in numbers.DIGITS or not _nonnegative(engine, a, b):
            return lift(lambda *leaves: engine.apply("trunc", value.dtype, *leaves), [a, b])
        name = "floor_divide"
    return engine.arithmetic(name, a, b, value.dtype)


def _as_operand(engine: Elements, value: Value, operand: Any, index: Index) -> Expr:
    if isinstance(operand, float) and value.dtype in numbers.DIGITS:
        return operand  # one of its readings: wider than the dtype, it may be
    return _tensor(engine, value, operand, index, value.dtype)


def _nonnegative(engine: Elements, *operands: Expr) -> bool:
    return all(engine.compare("ge", x, 0, torch.int64) is True for x in operands)


def _of_bools(name: str, engine: Elements, value: Value, index: Index) -> Expr | None:
    join = {"mul": _and, "minimum": _and, "add": _or, "maximum": _or}.get(name)
    return None if join is None else _logic(join, only_bool=True)(engine, value, index)


def _neg(engine: Elements, value: Value, index: Index) -> Expr:
    x = engine.operand(value, value.args[0], index)
    zero: Expr = 0.0 if value.dtype in numbers.DIGITS else 0
    return engine.arithmetic("sub", zero, x, value.dtype)


def _abs(engine: Elements, value: Value, index: Index) -> Expr:
    x = engine.operand(value, value.args[0], index)
    zero: Expr = 0.0 if value.dtype in numbers.DIGITS else 0

    def leaf(a: Leaf) -> Expr:
        opposite = numbers.arithmetic("sub", zero, a, value.dtype, engine.atoms)  # type: ignore[arg-type]
        both = None if opposite is None else numbers.arithmetic("maximum", a, opposite, value.dtype, engine.atoms)
        return engine.apply("abs", value.dtype, a) if both is None else both

    return lift(leaf, [x])


def _clamp(engine: Elements, value: Value, index: Index) -> Expr:
    found = engine.operand(value, value.args[0], index)
    source = value.args[0].dtype
    found = engine.cast(found, source, value.dtype)
    for limit, name in ((arg(value, "min"), "maximum"), (arg(value, "max"), "minimum")):
        if limit is not None:
            found = engine.arithmetic(name, found, _tensor(engine, value, limit, index, value.dtype), value.dtype)
    return found


RULES: dict[str, Rule] = {
    **dict.fromkeys("_to_copy clone detach alias lift lift_fresh lift_fresh_copy convert_element_type".split(), _same),
    "copy": _copy,
    "where": _where,
    "masked_fill": _masked_fill,
    "logical_and": _logic(_and, only_bool=False),
    "logical_or": _logic(_or, only_bool=False),
    "logical_xor": _logic(_xor, only_bool=False),
    **dict.fromkeys(("bitwise_and", "__and__"), _logic(_and, only_bool=True)),
    **dict.fromkeys(("bitwise_or", "__or__"), _logic(_or, only_bool=True)),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _logic(_xor, only_bool=True)),
    "logical_not": _not,
    "bitwise_not": _not,
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{
        name: _binary(name)
        for name in ("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "maximum", "minimum")
    },
    "neg": _neg,
    "abs": _abs,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
}
