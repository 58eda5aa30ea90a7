"""Bounds of integer forms, from those of their atoms: what decides comparisons and rules out overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from optpass.passes.attention.masks.integers import Atom, Int, const_of, of_atom, terms_of

#: No dim of a tensor is longer: a mask over such an axis would not fit into any memory. Only overflow checks use it.
LARGEST_DIM = 2**30

Range: TypeAlias = tuple[int | None, int | None]


def extreme(x: Int, high: bool = False) -> Int | None:
    """A bound of `x` over all values of its atoms other than sizes: a form over sizes; None where there is none."""
    if isinstance(x, int):
        return x
    total: Int = x.const
    for atom, factor in x.terms:
        if atom.kind == "size":
            total = total + of_atom(atom) * factor
            continue
        bound = atom.high if (factor > 0) == high else atom.low
        if bound is None:
            return None
        total = total + bound * factor
    return total


def numeric(x: Int, high: bool = False) -> int | None:
    """A bound of `x` as a number."""
    bound = extreme(x, high)
    if bound is None or isinstance(bound, int):
        return bound
    total = bound.const
    for atom, factor in bound.terms:
        limit = atom.high if (factor > 0) == high else atom.low
        if not isinstance(limit, int):
            return None
        total += limit * factor
    return total


def nonneg(x: Int) -> bool:
    """True where `x` >= 0 follows from the bounds of its atoms; vacuous where an axis is empty."""
    low = numeric(x)
    return low is not None and low >= 0


def within(x: Int, low: int, high: int) -> bool:
    """True where every value of `x` lies in low .. high, no dim being longer than LARGEST_DIM."""
    bottom, top = range_of(x)
    return bottom is not None and top is not None and low <= bottom and top <= high


def range_of(x: Int) -> tuple[int | None, int | None]:
    """Bounds of `x` as numbers, no dim being longer than LARGEST_DIM."""
    low: int | None = const_of(x)
    high: int | None = const_of(x)
    for atom, factor in terms_of(x):
        ends = [None if end is None else end * factor for end in _range_of_atom(atom)]
        bottom, top = ends if factor > 0 else ends[::-1]
        low = None if low is None or bottom is None else low + bottom
        high = None if high is None or top is None else high + top
    return low, high


def _range_of_atom(atom: Atom) -> tuple[int | None, int | None]:
    if atom.kind == "size":
        low = atom.low if isinstance(atom.low, int) else -LARGEST_DIM
        return low, atom.high if isinstance(atom.high, int) else LARGEST_DIM
    if atom.kind == "axis":
        return 0, range_of(atom.args[1])[1]
    if atom.kind == "call":
        return BOUNDS[atom.args[0]](*(range_of(x) for x in atom.args[2:]))
    return (atom.low if isinstance(atom.low, int) else None), (atom.high if isinstance(atom.high, int) else None)


# ---- of functions, from the bounds of their operands ---------------------------------------------------------------


def _bounds_floordiv(x: Range, by: Range) -> Range:
    if by[0] != by[1] or by[0] is None or by[0] <= 0:
        return None, None
    return (None if x[0] is None else x[0] // by[0]), (None if x[1] is None else x[1] // by[0])


def _bounds_mod(x: Range, by: Range) -> Range:
    if by[0] is None or by[0] <= 0:
        return None, None
    return 0, None if by[1] is None else by[1] - 1


def _bounds_max(x: Range, y: Range) -> Range:
    lows = [n for n in (x[0], y[0]) if n is not None]
    return max(lows, default=None), None if x[1] is None or y[1] is None else max(x[1], y[1])


def _bounds_min(x: Range, y: Range) -> Range:
    highs = [n for n in (x[1], y[1]) if n is not None]
    return None if x[0] is None or y[0] is None else min(x[0], y[0]), min(highs, default=None)


def _bounds_mul(x: Range, y: Range) -> Range:
    if x[0] is None or x[1] is None or y[0] is None or y[1] is None:
        return (0 if (x[0] or -1) >= 0 and (y[0] or -1) >= 0 else None), None
    products = [a * b for a in (x[0], x[1]) for b in (y[0], y[1])]
    return min(products), max(products)


BOUNDS: dict[str, Callable[[Range, Range], Range]] = {
    "floordiv": _bounds_floordiv, "mod": _bounds_mod, "max": _bounds_max, "min": _bounds_min, "mul": _bounds_mul,
}  # fmt: skip
