"""Exact integer expressions of mask proofs: linear forms over axes, sizes and unknown elements.

No tensors and no dtypes here: numbers are the integers of mathematics, whoever makes a form says whether a dtype holds
it. A linear form without terms is a plain `int`, so `Int` is what functions take and give. What bounds them is in
`bounds`, what makes atoms in `atoms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias


class Atom:
    """One unknown, made once per distinct content by `Atoms`, so that identity is equality.

    Attributes:
        kind: 'axis' (an index that runs over 0 .. size-1), 'size' (of a dim), 'elem' (an element of a tensor that
            nothing is known of), 'call' (a function of other expressions).
        args: what makes it, by kind: (name, size), (sympy expression,), (Value, indices), (function, dtype, *operands).
        axes: names of the axes it depends on.
        low, high: inclusive bounds, None where unknown; those of an axis may hold sizes, others are ints.
    """

    __slots__ = ("args", "axes", "high", "kind", "low", "serial")

    def __init__(
        self, serial: int, kind: str, args: tuple[Any, ...], axes: frozenset[str], low: Int | None, high: Int | None
    ) -> None:  # fmt: skip
        self.serial, self.kind, self.args, self.axes, self.low, self.high = serial, kind, args, axes, low, high

    def __repr__(self) -> str:
        if self.kind in ("axis", "size"):
            return str(self.args[0])
        if self.kind == "elem":
            return f"{self.args[0].name or self.args[0].leaf}{list(self.args[1])}"
        return f"{self.args[0]}({', '.join(map(repr, self.args[2 if self.kind == 'call' else 3 :]))})"


class Lin:
    """const + Σ coefficient · atom, with at least one term; terms in the order in which the atoms were made."""

    __slots__ = ("_hash", "const", "terms")

    def __init__(self, const: int, terms: tuple[tuple[Atom, int], ...]) -> None:
        self.const, self.terms = const, terms
        self._hash = hash((const, terms))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Lin)
            and self._hash == other._hash
            and self.const == other.const
            and self.terms == other.terms
        )

    def __add__(self, other: Int) -> Int:
        if isinstance(other, int):
            return Lin(self.const + other, self.terms)
        return linear(self.const + other.const, (*self.terms, *other.terms))

    __radd__ = __add__

    def __neg__(self) -> Int:
        return Lin(-self.const, tuple((a, -c) for a, c in self.terms))

    def __sub__(self, other: Int) -> Int:
        return self + (-other)

    def __rsub__(self, other: int) -> Int:
        return -self + other

    def __mul__(self, factor: int) -> Int:
        return Lin(self.const * factor, tuple((a, c * factor) for a, c in self.terms)) if factor else 0

    __rmul__ = __mul__

    def __repr__(self) -> str:
        parts = [f"{'-' if c < 0 else '+'} {'' if abs(c) == 1 else f'{abs(c)}·'}{a!r}" for a, c in self.terms]
        text = " ".join(parts).removeprefix("+ ")
        return f"{text} {'-' if self.const < 0 else '+'} {abs(self.const)}" if self.const else text


Int: TypeAlias = int | Lin


def linear(const: int, terms: Iterable[tuple[Atom, int]]) -> Int:
    found: dict[Atom, int] = {}
    for atom, factor in terms:
        found[atom] = found.get(atom, 0) + factor
    kept = [(a, c) for a, c in found.items() if c]
    if not kept:
        return const
    kept.sort(key=lambda term: term[0].serial)
    return Lin(const, tuple(kept))


def of_atom(atom: Atom) -> Int:
    """The form that is this atom alone."""
    return Lin(0, ((atom, 1),))


def terms_of(x: Int) -> tuple[tuple[Atom, int], ...]:
    """Terms; none for an int."""
    return x.terms if isinstance(x, Lin) else ()


def const_of(x: Int) -> int:
    """The part without atoms."""
    return x.const if isinstance(x, Lin) else x


def coefficient(x: Int, axis: str) -> int:
    """Factor of the axis called `axis` where it stands by itself."""
    return next((c for a, c in terms_of(x) if a.kind == "axis" and a.args[0] == axis), 0)


def without(x: Int, atoms: Iterable[Atom]) -> Int:
    """`x` less its terms over `atoms`."""
    gone = set(atoms)
    return linear(const_of(x), [(a, c) for a, c in terms_of(x) if a not in gone])


def axes_of(x: Int) -> frozenset[str]:
    """Names of the axes that `x` depends on."""
    found: frozenset[str] = frozenset()
    for atom, _ in terms_of(x):
        found |= atom.axes
    return found


def substitute(x: Int, by: Mapping[str, Int], atom: Callable[[Atom], Int]) -> Int:
    """`x` with axes replaced; `atom` rebuilds any other atom that depends on one of them."""
    total: Int = const_of(x)
    for term, factor in terms_of(x):
        if term.kind == "axis":
            value = by.get(term.args[0])
            total = total + (of_atom(term) if value is None else value) * factor
        else:
            total = total + (of_atom(term) if term.axes.isdisjoint(by) else atom(term)) * factor
    return total
