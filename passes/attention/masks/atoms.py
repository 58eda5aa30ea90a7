"""Where the unknowns of one graph are made, each distinct one once, and functions of them that simplify exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optpass.passes.attention.masks.bounds import BOUNDS, nonneg, numeric
from optpass.passes.attention.masks.integers import Atom, Int, Lin, axes_of, linear, of_atom


class Atoms:
    """Makes atoms, each distinct one once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Atom] = {}

    def make(
        self, kind: str, args: tuple[Any, ...], axes: frozenset[str], low: Int | None = None, high: Int | None = None
    ) -> Atom:  # fmt: skip
        """The atom of this kind and content."""
        key = (kind, *args)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Atom(len(self._known), kind, args, axes, low, high)
        return found

    def axis(self, name: str, size: Int) -> Int:
        """The index that runs over 0 .. size-1; 0 where the size is 1."""
        if size == 1:
            return 0
        return of_atom(self.make("axis", (name, size), frozenset((name,)), 0, size - 1))

    def call(self, function: str, *operands: Int) -> Int:
        """floordiv, mod, max, min or mul of integers, simplified where that is exact."""
        simple = _SIMPLER[function](*operands)
        if simple is not None:
            return simple
        low, high = BOUNDS[function](*((numeric(x), numeric(x, True)) for x in operands))
        axes = frozenset[str]().union(*map(axes_of, operands))
        return of_atom(self.make("call", (function, "int", *operands), axes, low, high))


def _simple_floordiv(x: Int, by: Int) -> Int | None:
    if not isinstance(by, int) or by <= 0:
        return None
    if isinstance(x, int):
        return x // by
    whole, rest = _split(x, by)
    if nonneg(rest) and nonneg(by - 1 - rest):
        return whole
    return None


def _simple_mod(x: Int, by: Int) -> Int | None:
    if not isinstance(by, int) or by <= 0:
        return None
    if isinstance(x, int):
        return x % by
    rest = _split(x, by)[1]
    return rest if nonneg(rest) and nonneg(by - 1 - rest) else None


def _split(x: Lin, by: int) -> tuple[Int, Int]:
    """`x` as by · whole + rest, the rest without terms that are multiples of `by`."""
    whole = linear(x.const // by, [(a, c // by) for a, c in x.terms if c % by == 0])
    return whole, x - whole * by


def _simple_max(x: Int, y: Int) -> Int | None:
    return x if nonneg(x - y) else y if nonneg(y - x) else None


def _simple_min(x: Int, y: Int) -> Int | None:
    return y if nonneg(x - y) else x if nonneg(y - x) else None


def _simple_mul(x: Int, y: Int) -> Int | None:
    if isinstance(x, int):
        return y * x
    return x * y if isinstance(y, int) else None


_SIMPLER: dict[str, Callable[[Int, Int], Int | None]] = {
    "floordiv": _simple_floordiv, "mod": _simple_mod, "max": _simple_max, "min": _simple_min, "mul": _simple_mul,
}  # fmt: skip
