"""Single propositions of mask proofs: integer forms compared with 0, and unknown truths; what one says of another.

Nothing here knows floats. What joins propositions is in `predicates`.
"""

from __future__ import annotations

from math import gcd
from typing import TypeAlias

from optpass.passes.attention.masks.bounds import nonneg
from optpass.passes.attention.masks.integers import Atom, Int, Lin, axes_of, terms_of

_SIGNS = {"ge": ">=", "eq": "=", "ne": "!="}


class Pred:
    """A proposition that is neither always true nor always false, as far as is known.

    Attributes:
        op: 'ge' (form >= 0), 'eq', 'ne' (form = 0, != 0), 'is', 'not' (an unknown truth, or its opposite), 'and', 'or'.
        args: the form, the atom, or the parts.
        axes: names of the axes it depends on.
        negated: its opposite, once that was made.
    """

    __slots__ = ("_hash", "args", "axes", "negated", "op")

    def __init__(self, op: str, args: tuple[object, ...], axes: frozenset[str]) -> None:
        self.op, self.args, self.axes = op, args, axes
        self._hash = hash((op, args))
        self.negated: Bool | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Pred) and self._hash == other._hash and self.op == other.op and self.args == other.args
        )

    @property
    def form(self) -> Lin:
        """The form of a comparison."""
        (form,) = self.args
        assert isinstance(form, Lin)
        return form

    @property
    def atom(self) -> Atom:
        """The unknown truth of 'is' and 'not'."""
        (atom,) = self.args
        assert isinstance(atom, Atom)
        return atom

    @property
    def parts(self) -> tuple[Pred, ...]:
        """Parts of 'and' and 'or'."""
        return tuple(part for part in self.args if isinstance(part, Pred))

    def __repr__(self) -> str:
        if self.op in ("and", "or"):
            return f" {self.op} ".join(f"({part!r})" if part.op in ("and", "or") else repr(part) for part in self.parts)
        if self.op in ("is", "not"):
            return f"{'' if self.op == 'is' else 'not '}{self.atom!r}"
        return f"{self.form!r} {_SIGNS[self.op]} 0"


Bool: TypeAlias = bool | Pred


# ---- making them ----------------------------------------------------------------------------------------------------


def at_least_0(x: Int) -> Bool:
    """x >= 0, divided by the common factor of its terms."""
    if isinstance(x, int):
        return x >= 0
    if nonneg(x):
        return True
    if nonneg(-x - 1):
        return False
    common = gcd(*(c for _, c in x.terms))
    if common > 1:
        x = Lin(x.const // common, tuple((a, c // common) for a, c in x.terms))
    return Pred("ge", (x,), axes_of(x))


def equals_0(x: Int) -> Bool:
    """x = 0, divided by the common factor of its terms, the first term positive."""
    if isinstance(x, int):
        return x == 0
    if nonneg(x - 1) or nonneg(-x - 1):
        return False
    if nonneg(x) and nonneg(-x):
        return True
    common = gcd(*(c for _, c in x.terms))
    if x.const % common:
        return False
    common = common if x.terms[0][1] > 0 else -common
    if common != 1:
        x = Lin(x.const // common, tuple((a, c // common) for a, c in x.terms))
    return Pred("eq", (x,), axes_of(x))


def truth(atom: Atom) -> Bool:
    """An unknown truth."""
    return Pred("is", (atom,), atom.axes)


def opposite(p: Pred) -> Bool:
    """not p, of a single proposition."""
    if p.op == "ge":
        return at_least_0(-p.form - 1)
    swapped = {"eq": "ne", "ne": "eq", "is": "not", "not": "is"}[p.op]
    return Pred(swapped, p.args, p.axes)


# ---- what one says of another ---------------------------------------------------------------------------------------


def follows(p: Pred, q: Pred) -> bool:
    """True where q is seen to hold wherever p does, both single propositions."""
    if p == q:
        return True
    if p.op in ("ge", "eq") and q.op == "ge":
        return any(_comparable(form, q.form) and nonneg(q.form - form) for form in _at_least(p))
    return q.op == "ne" and excludes(p, Pred("eq", q.args, q.axes))


def excludes(p: Pred, q: Pred) -> bool:
    """True where the two are seen never to hold together, both single propositions."""
    if p.op in ("ge", "eq") and q.op in ("ge", "eq"):
        pairs = ((one, other) for one in _at_least(p) for other in _at_least(q))
        return any(_comparable(one, other) and nonneg(-(one + other) - 1) for one, other in pairs)
    return {p.op, q.op} in ({"eq", "ne"}, {"is", "not"}) and p.args == q.args


def _at_least(p: Pred) -> tuple[Int, ...]:
    """The forms that 'ge' or 'eq' says to be >= 0."""
    return (p.form,) if p.op == "ge" else (p.form, -p.form)


def _comparable(x: Int, y: Int) -> bool:
    """True where a difference of the two may be decided: it costs little to say no."""
    return not {a for a, _ in terms_of(x)}.isdisjoint(a for a, _ in terms_of(y))
