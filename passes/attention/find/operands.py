"""What is the same on all sides of an attention: products and their operands, numbers that scale, maxima of rows.

Values alone; what is made of them is in `scores` and `core`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from optpass.passes.attention.axes import Axis, Dims, above, atoms, equal, is_one, known_equal, resolve
from optpass.passes.attention.program.ir import Value, arg, same
from optpass.passes.attention.site import Number, Operand

PRODUCTS = frozenset({"bmm", "mm", "baddbmm", "addmm"})
Constant = Callable[[Value], bool | int | float | None]
Now = Callable[[Value], tuple[bool | int | float | None, tuple[Value, ...]]]
#: Functions of symbolic numbers that are positive where their arguments are.
_KEEP_SIGNS = frozenset({"ToFloat", "FloatTrueDiv", "IntTrueDiv", "OpaqueUnaryFn_sqrt", "OpaqueUnaryFn_exp"})
FLOATS = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}


def exact_cast(source: torch.dtype, to: torch.dtype) -> bool:
    """Whether every value of `source` exists in `to`."""
    return source in FLOATS and to in FLOATS and (source == to or FLOATS[source] < FLOATS[to])


def product_operands(product: Value) -> tuple[Value, Value]:
    """The two factors of a matrix product, left and right."""
    first = 1 if product.name in ("baddbmm", "addmm") else 0
    return product.args[first], product.args[first + 1]


def peel(operand: Operand, constant: Constant, *, grad: bool) -> tuple[Operand, Number]:
    """Strip layout, exact upcasts and multiplications by numbers off an operand of a product; returns the number."""
    value, dims = operand.value, operand.dims
    scale: Number = 1.0
    while True:
        source = value.args[0] if value.args and isinstance(value.args[0], Value) else None
        if source is not None and source.grad != grad:
            return Operand(value, resolve(dims)), scale  # on the other side of a no_grad
        if source is not None and source.gone and not value.gone:
            return Operand(value, resolve(dims)), scale  # scaled in place, or copied before its source was written to
        step = above(value, dims)
        if step is not None:
            value, dims = step
            continue
        if value.name == "_to_copy" and source is not None and exact_cast(source.dtype, value.dtype):
            value = source
            continue
        number, inner = scaled(value, constant)
        if inner is None or number is None or inner.dtype != value.dtype:
            return Operand(value, resolve(dims)), scale
        value, scale = inner, scale * number


def scaled(value: Value, constant: Constant) -> tuple[Number | None, Value | None]:
    """`(c, x)` where `value` is `x * c` and has x's shape, for a finite number other than 0, or a symbolic one."""
    number, source = multiple(value, constant)
    return (number, source) if source is not None and same_shape(source, value) else (None, None)


def multiple(value: Value, constant: Constant) -> tuple[Number | None, Value | None]:
    """`scaled`, where the number may be a tensor that repeats x."""
    if value.name not in ("mul", "div") or (value.name == "div" and arg(value, "rounding_mode")):
        return None, None
    for x, other in ((value.args[0], value.args[1]), (value.args[1], value.args[0])):
        if not isinstance(x, Value) or (value.name == "div" and x is not value.args[0]):
            continue
        number = constant(other) if isinstance(other, Value) else other
        if isinstance(number, (torch.SymInt, torch.SymFloat)):  # of any sign, unless it is made of sizes: `positive`
            symbolic: Number = number
            return (1.0 / symbolic if value.name == "div" else 1.0 * symbolic), x
        if not isinstance(number, (int, float)):
            continue
        c = float(number)
        if value.name == "div":
            c = 1.0 / c if c else math.nan
        if math.isfinite(c) and c != 0.0:
            return c, x
    return None, None


def fixed(number: Any, axes: tuple[Axis, ...]) -> float | None:
    """A number that is not known when compiling as what it is now, which becomes a guard: one that is made of floats
    and of sizes of `axes`, which change with the model and not with the batch. None for any other."""
    if not isinstance(number, torch.SymFloat):
        return float(number) if isinstance(number, (int, float)) else None
    sizes = {s for axis in atoms(axes) for s in getattr(axis.size, "free_symbols", ())}
    made_of = number.node.expr.free_symbols
    if number.node.hint is None or any(s.is_integer and s not in sizes for s in made_of):
        return None
    found = float(number)
    return found if math.isfinite(found) else None


def same_shape(one: Value, other: Value) -> bool:
    """Whether two values have the same dims, and none is repeated to make the other."""
    sizes = zip(one.shape, other.shape, strict=False)
    return one.dim == other.dim and all(known_equal(a, b) for a, b in sizes)


def positive(number: torch.SymFloat) -> bool:
    """Whether a symbolic number is proved to be greater than 0; that is one made of sizes, not one that a user sets."""
    return _positive(number.node.expr)


def _positive(expr: Any) -> bool:
    if expr.is_Symbol or expr.is_Number:
        return bool(expr.is_positive)
    if expr.is_Pow or type(expr).__name__ in ("FloatPow", "PowByNatural"):
        return _positive(expr.args[0])
    keeps = expr.is_Add or expr.is_Mul or type(expr).__name__ in _KEEP_SIGNS
    return keeps and all(map(_positive, expr.args))


def shifts_rows(candidate: Value, scores: Value, dims: Dims, keys: tuple[Axis, ...]) -> bool:
    """Whether `candidate` is a maximum of `scores` over the keys, and maybe more: one number for each row.

    `dims` are the axes of `scores`; the maximum must keep a place for each dim that it is taken over, or be of all.
    """
    maximum = candidate = _narrow(candidate, scores)
    while maximum.name in ("detach", "alias", "unsqueeze", "view", "reshape") and maximum is not scores:
        maximum = maximum.args[0]
    if maximum.name not in ("amax", "max") or maximum.index != 0:
        return False
    over = maximum.args[1] if len(maximum.args) > 1 else None
    taken = _dims_over(maximum.args[0], scores, over)
    if over is None and maximum.name == "max" and taken:
        return candidate.dim == 0
    if not taken or candidate.dim != scores.dim:
        return False
    sizes = enumerate(zip(candidate.shape, scores.shape, strict=True))
    kept = all(is_one(c) if d in taken else equal(c, s) for d, (c, s) in sizes)
    return kept and any(set(atoms(dims[d])) == set(keys) for d in taken)


def is_of_one_row(candidate: Value, scores: Value) -> bool:
    """Whether a maximum that `shifts_rows` is of a row each, and not of several."""
    narrow = _narrow(candidate, scores)
    pairs = zip(narrow.shape, scores.shape, strict=False)
    return narrow.dim == scores.dim and sum(not equal(a, b) for a, b in pairs) <= 1


def _narrow(candidate: Value, scores: Value) -> Value:
    """`candidate`, before it was expanded to the shape of `scores`."""
    expanded = candidate.name == "expand" and candidate.dim == scores.dim and candidate.args[0].dim == scores.dim
    return candidate.args[0] if expanded else candidate


def _dims_over(source: Value, scores: Value, over: Any) -> set[int]:
    """Dims of `scores` that a reduction of `source` is over, which is these or has its last dims merged; none where it
    is neither. `over`: dims of `source`, None for all."""
    axes = [over] if isinstance(over, int) else list(over or range(source.dim))
    if detached(source, scores) is scores:
        return {axis % scores.dim for axis in axes}
    merged = source.name in ("view", "reshape") and detached(source.args[0], scores) is scores
    last = source.dim - 1
    if not merged or source.dim > scores.dim or [axis % source.dim for axis in axes] != [last]:
        return set()
    alike = all(equal(a, b) for a, b in zip(source.shape[:last], scores.shape[:last], strict=True))
    return set(range(last, scores.dim)) if alike else set()


def detached(value: Value, source: Value) -> Value:
    """`value`, or what it was before it was cut off from gradients, as far up as `source`."""
    while value is not source and value.name in ("detach", "alias"):
        value = value.args[0]
    return value


def row_maximum_values(candidate: Value, scores: Value) -> list[Value]:
    """The values from `candidate` down to `scores`."""
    found = []
    while candidate is not scores:
        found.append(candidate)
        candidate = candidate.args[0]
    return found


def not_zero(value: Value) -> Value:
    """`value != 0`, which no node of the graph computes."""
    return Value(
        value.tensor.new_empty(value.shape, dtype=torch.bool), op=torch.ops.aten.ne.Scalar, args=(value, 0),
        node=value.node, grad=value.grad, autocast=value.autocast,
    )  # fmt: skip


def complement(value: Value, constant: Constant) -> tuple[float, Value] | None:
    """`(c, m)` where `value` is `c · (1 - m)`; None if it is not."""
    number = 1.0
    while True:
        times, source = scaled(value, constant)
        # Small integers wrap around.
        wide = value.dtype.is_floating_point or value.dtype in (torch.int64, torch.int32)
        if source is not None and isinstance(times, float) and wide:
            value, number = source, number * times
        elif value.name == "_to_copy" and value.dtype.is_floating_point:
            value = value.args[0]
        else:
            break
    if value.name == "rsub":
        mask, one = value.args[0], value.args[1]
    elif value.name == "sub":
        one, mask = value.args[0], value.args[1]
    else:
        return None
    if not isinstance(mask, Value) or arg(value, "alpha") not in (None, 1):
        return None
    one = constant(one) if isinstance(one, Value) else one
    return (number, mask) if one == 1 else None


def before_casts(one: Value, other: Value) -> Value | None:
    """What both are casts of, the nearest; None where they are not of one."""
    found = [a for a in _uncast(one) if any(same(a, b) for b in _uncast(other))]
    return found[0] if found else None


def is_binary(value: Value) -> bool:
    """Whether it is a mask, or a cast of one: 0 and 1 in any dtype."""
    return any(v.dtype == torch.bool for v in _uncast(value))


def _uncast(value: Value) -> Iterator[Value]:
    """`value`, and what it was before its casts."""
    yield value
    while value.name == "_to_copy":
        value = value.args[0]
        yield value
