"""Axes: which index of the attention each dim of a tensor runs over, followed backwards through layout operations.

A tensor's dims are lists of axes, outermost first; a dim of size 1 has none. Reshapes split axes and never guess: two
axes of the same size stay two axes, and a reshape that cuts across one is not followed. Sizes may be symbolic; they
are compared as expressions and never add a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optpass.passes.attention.program.ir import Value

Size = Any  #: int, SymInt or sympy expression


class Axis:
    """One index. Splitting it (by a reshape) gives it parts, and every tensor that has it then has the parts."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Size) -> None:
        self.size = expression(size)
        self.parts: tuple[Axis, ...] = ()

    def split(self, outer: Size) -> tuple[Axis, ...]:
        """Into an axis of size `outer` and the rest. The caller has checked that it divides."""
        self.parts = (Axis(outer), Axis(quotient(self.size, outer)))
        return self.parts

    def __repr__(self) -> str:
        return f"{self.size}" if not self.parts else f"({'*'.join(map(repr, self.parts))})"


Dims = tuple[tuple[Axis, ...], ...]


def atoms(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """`axes` with every split axis replaced by its parts."""
    found: list[Axis] = []
    for axis in axes:
        found.extend(atoms(axis.parts) if axis.parts else (axis,))
    return tuple(found)


def resolve(dims: Dims) -> Dims:
    """`dims` in atoms."""
    return tuple(atoms(d) for d in dims)


def flat(dims: Dims) -> tuple[Axis, ...]:
    """All atoms of `dims` in order."""
    return atoms(a for d in dims for a in d)


def fresh(shape: Sequence[Size]) -> Dims:
    """New axes for a tensor of this shape."""
    return tuple(() if is_one(s) else (Axis(s),) for s in shape)


def expression(size: Size) -> Any:
    """An int, or a sympy expression."""
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    if isinstance(size, sympy.Expr):
        size = size.replace(_is_division, _divided)
        return int(size) if size.is_Integer else size
    return size


def _is_division(expr: Any) -> bool:
    return type(expr).__name__ == "FloorDiv"


def _divisions(expr: Any) -> list[Any]:
    """The outermost divisions with rounding in an expression."""
    if not isinstance(expr, sympy.Expr):
        return []
    return [expr] if _is_division(expr) else [d for a in expr.args for d in _divisions(a)]


def _divided(expr: Any) -> Any:
    """`a // b` as `a / b` where that is a whole number."""
    found = quotient(*expr.args) if not any(a.has(type(expr)) for a in expr.args) else None
    return expr if found is None else sympy.sympify(found)


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are the same for every value of their symbols."""
    a, b = expression(a), expression(b)
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else bool(sympy.expand(a - b) == 0)


def known_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are the same by their form, or by what the graph's guards say of their symbols already."""
    return equal(a, b) or bool(statically_known_true(a == b))


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes (or strides) are the same for every value of their symbols."""
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def is_one(size: Size) -> bool:
    """Whether a size is 1 for certain."""
    return bool(expression(size) == 1)


def quotient(a: Size, b: Size) -> Any:
    """`a / b` if it is a whole number for every value of the symbols; None otherwise."""
    a, b = expression(a), expression(b)
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a % b == 0 else None
    divisions = {d: sympy.Dummy(integer=True) for e in (a, b) for d in _divisions(e)}  # each a whole number as well
    back = {symbol: division for division, symbol in divisions.items()}
    try:
        a, b = (sympy.sympify(e).xreplace(divisions) for e in (a, b))
        result = sympy.cancel(a / b)
        top, bottom = sympy.fraction(result)
        symbols = top.free_symbols
        whole = bottom == 1 and (not symbols or all(c.is_Integer for c in sympy.Poly(top, *symbols).coeffs()))
    except sympy.PolynomialError:  # another operation with rounding
        return None
    result = result.xreplace(back)
    return expression(result) if whole else None


def regroup(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """The axes of a tensor of `shape` that holds the same elements in the same order; None if it cuts across axes."""
    queue, sizes = list(flat(dims)), list(shape)
    front: list[tuple[Axis, ...]] = []
    while sizes and (group := _group(queue, sizes[0])) is not None:
        front.append(group)
        sizes.pop(0)
    back: list[tuple[Axis, ...]] = []
    while len(sizes) > 1 and (group := _group(queue, sizes[-1], last=True)) is not None:
        back.insert(0, group)
        sizes.pop()
    if len(sizes) == 1 and queue:  # both hold as many elements, so what is left on one side is what is on the other
        front.append(tuple(queue))
        queue, sizes = [], []
    return None if queue or sizes else (*front, *back)


def _group(queue: list[Axis], size: Size, *, last: bool = False) -> tuple[Axis, ...] | None:
    """Take axes of together this size off one end of the queue; None, and the queue as it was, if there are none."""
    rest, group, need = list(queue), list[Axis](), expression(size)
    while not is_one(need):
        if not rest:
            return None
        axis = rest.pop() if last else rest.pop(0)
        times, inside = 1 if equal(need, axis.size) else quotient(need, axis.size), quotient(axis.size, need)
        if times is not None:
            group.insert(0 if last else len(group), axis)
            need = times
        elif inside:  # nothing is not split
            at = len(rest) if last else 0
            rest[at:at] = axis.split(inside if last else need)
        else:
            return None
    queue[:] = rest
    return tuple(group)


def unexpand(dims: Dims, shape: Sequence[Size], source: Sequence[Size]) -> Dims:
    """The axes of a tensor of shape `source` that was expanded to `shape`."""
    extra = len(shape) - len(source)
    return tuple(() if is_one(have) else d for d, have in zip(dims[extra:], source, strict=True))


def broadcast(dims: Dims, shape: Sequence[Size]) -> Dims:
    """The axes of an operand of `shape` that broadcasts against a tensor with `dims`."""
    extra = len(dims) - len(shape)
    return tuple(() if is_one(s) else d for d, s in zip(dims[extra:], shape, strict=True))


def above(value: Value, dims: Dims) -> tuple[Value, Dims] | None:
    """What a layout operation rearranges, with its axes; None if `value` is anything but that."""
    rule = _LAYOUT.get(value.name)
    if rule is None or not value.args:
        return None
    source = value.args[0]
    if isinstance(source, (list, tuple)) and source and all(s is source[0] for s in source):
        source = source[0]  # `stack([k, k])`: copies of one tensor
    if not isinstance(source, Value):
        return None
    found = rule(value, source, dims)
    return None if found is None else (source, found)


def below(value: Value, user: Value, dims: Dims) -> Dims | None:
    """Axes of `user`, which only lays `value` out differently; None if it does more. The other way round: `above`."""
    if user.dtype != value.dtype or user.args[0] is not value:
        return None
    if user.name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"):
        return regroup(dims, user.shape)
    if user.name == "permute":
        return tuple(dims[d] for d in user.args[1])
    if user.name == "transpose":
        order = list(range(value.dim))
        a, b = user.args[1] % value.dim, user.args[2] % value.dim
        order[a], order[b] = order[b], order[a]
        return tuple(dims[d] for d in order)
    if user.name in ("clone", "alias", "contiguous"):
        return dims
    return None


def _same(value: Value, source: Value, dims: Dims) -> Dims | None:
    return dims if source.dtype == value.dtype else None


def _view(value: Value, source: Value, dims: Dims) -> Dims | None:
    return regroup(dims, source.shape) if source.dtype == value.dtype else None


def _expand(value: Value, source: Value, dims: Dims) -> Dims | None:
    return unexpand(dims, value.shape, source.shape)


def _permute(value: Value, source: Value, dims: Dims) -> Dims | None:
    order = [d % source.dim for d in value.args[1]]
    return tuple(dims[order.index(d)] for d in range(source.dim))


def _transpose(value: Value, source: Value, dims: Dims) -> Dims | None:
    found = list(dims)
    if source.dim:
        a, b = (0, 1) if value.name == "t" else (value.args[1] % source.dim, value.args[2] % source.dim)
        if source.dim > 1:
            found[a], found[b] = found[b], found[a]
    return tuple(found)


def _unsqueeze(value: Value, source: Value, dims: Dims) -> Dims | None:
    at = value.args[1] % value.dim
    return (*dims[:at], *dims[at + 1 :])


def _squeeze(value: Value, source: Value, dims: Dims) -> Dims | None:
    return regroup(dims, source.shape)


def _slice(value: Value, source: Value, dims: Dims) -> Dims | None:
    """A slice that takes everything."""
    whole = all(equal(a, b) for a, b in zip(value.shape, source.shape, strict=True))
    return dims if whole and value.args[4] == 1 else None


def _repeat(value: Value, source: Value, dims: Dims) -> Dims | None:
    """Tiling: each dim is (copy, element)."""
    repeats, extra = value.args[1], value.dim - source.dim
    found: list[tuple[Axis, ...]] = []
    for axes, times, size in zip(dims[extra:], repeats[extra:], source.shape, strict=True):
        if is_one(times):
            found.append(axes)
        elif is_one(size):
            found.append(())
        else:
            halves = regroup((axes,), (times, size))
            if halves is None:
                return None
            found.append(halves[1])
    return tuple(found)


def _stack(value: Value, source: Value, dims: Dims) -> Dims | None:
    at = value.args[1] % value.dim
    return (*dims[:at], *dims[at + 1 :])


def _cat(value: Value, source: Value, dims: Dims) -> Dims | None:
    """Copies one after the other: (copy, element)."""
    at = value.args[1] % value.dim
    halves = regroup((dims[at],), (len(value.args[0]), source.shape[at]))
    return None if halves is None else (*dims[:at], halves[1], *dims[at + 1 :])


_LAYOUT = {
    "view": _view, "_unsafe_view": _view, "reshape": _view, "_reshape_alias": _view, "expand": _expand,
    "permute": _permute, "transpose": _transpose, "t": _transpose, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "clone": _same, "contiguous": _same, "alias": _same, "lift_fresh": _same, "slice": _slice, "repeat": _repeat,
    "stack": _stack, "cat": _cat,
}  # fmt: skip


def known(condition: Any) -> bool:
    """A condition on sizes that holds whatever their symbols are, without a guard."""
    return bool(statically_known_true(condition))
