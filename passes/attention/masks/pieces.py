"""Numbers that depend on propositions: trees of `where(proposition, this, that)` over plain leaves.

Leaves are integers (`Int`), floats, or unknown floats (`Atom`); a bool tensor's element is a `Bool`, never a tree. What
an operation does to leaves is in `numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from optpass.passes.attention.masks.integers import Atom, Int, Lin, axes_of
from optpass.passes.attention.masks.predicates import Bool, Pred, all_of, any_of, choose, given, negate

#: Trees with more leaves are not followed: the element counts as unknown.
_MOST_LEAVES = 32


class Where:
    """`yes` where `pred` holds, `no` elsewhere."""

    __slots__ = ("_hash", "leaves", "no", "pred", "yes")

    def __init__(self, pred: Pred, yes: Number, no: Number) -> None:
        self.pred, self.yes, self.no = pred, yes, no
        self.leaves: int = sum(x.leaves if isinstance(x, Where) else 1 for x in (yes, no))
        self._hash = hash((pred, yes, no))
        if self.leaves > _MOST_LEAVES:
            raise TooManyPiecesError

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Where)
            and self._hash == other._hash
            and (self.pred, self.yes, self.no) == (other.pred, other.yes, other.no)
        )

    def __repr__(self) -> str:
        return f"where({self.pred!r}, {self.yes!r}, {self.no!r})"


Leaf: TypeAlias = Int | float | Atom
Number: TypeAlias = Leaf | Where
Expr: TypeAlias = Number | Bool


class TooManyPiecesError(Exception):
    """A tree outgrew what is followed."""


def where(p: Bool, yes: Expr, no: Expr) -> Expr:
    """`yes` where p holds, `no` elsewhere; both of one dtype."""
    if isinstance(p, bool):
        return yes if p else no
    if isinstance(yes, (bool, Pred)) or isinstance(no, (bool, Pred)):
        assert isinstance(yes, (bool, Pred)) and isinstance(no, (bool, Pred))
        return choose(p, yes, no)
    yes, no = _number(restrict(yes, p)), _number(restrict(no, negate(p)))
    if yes == no:
        return yes
    if isinstance(no, Where) and not isinstance(yes, Where):
        if no.yes == yes:
            return where(any_of((p, no.pred)), yes, no.no)
        if no.no == yes:
            return where(all_of((negate(p), no.pred)), no.yes, yes)
    if isinstance(yes, Where) and not isinstance(no, Where):
        if yes.no == no:
            return where(all_of((p, yes.pred)), yes.yes, no)
        if yes.yes == no:
            return where(all_of((p, negate(yes.pred))), yes.no, no)
    return Where(p, yes, no)


def _number(x: Expr) -> Number:
    assert not isinstance(x, (bool, Pred))
    return x


def restrict(x: Expr, fact: Bool) -> Expr:
    """`x` simplified where `fact` is known to hold."""
    if isinstance(x, Pred):
        return given(x, fact)
    if not isinstance(x, Where):
        return x
    known = given(x.pred, fact)
    if isinstance(known, bool):
        return restrict(x.yes if known else x.no, fact)
    yes, no = _number(restrict(x.yes, fact)), _number(restrict(x.no, fact))
    if yes == no:
        return yes
    return x if known is x.pred and yes is x.yes and no is x.no else Where(known, yes, no)


def lift(function: Callable[..., Expr], operands: Sequence[Expr]) -> Expr:
    """`function` of leaves (and Bools), applied to trees."""
    for operand in operands:
        if isinstance(operand, Where):
            p = operand.pred
            yes, no = zip(*(_sides(x, p) for x in operands), strict=True)
            return where(p, lift(function, yes), lift(function, no))
    return function(*operands)


def _sides(x: Expr, p: Pred) -> tuple[Expr, Expr]:
    """`x` where p holds, and where it does not."""
    yes, no = (x.yes, x.no) if isinstance(x, Where) and x.pred == p else (x, x)
    return restrict(yes, p), restrict(no, negate(p))


def leaves(x: Number) -> Iterator[Leaf]:
    """Leaves of a tree."""
    if isinstance(x, Where):
        yield from leaves(x.yes)
        yield from leaves(x.no)
    else:
        yield x


def holds(x: Number, test: Callable[[Leaf], Bool]) -> Bool:
    """The proposition that `test` says of each leaf."""
    if isinstance(x, Where):
        return choose(x.pred, holds(x.yes, test), holds(x.no, test))
    return test(x)


def axes(x: Expr) -> frozenset[str]:
    """Names of the axes that `x` depends on."""
    if isinstance(x, Where):
        return x.pred.axes | axes(x.yes) | axes(x.no)
    if isinstance(x, Pred):
        return x.axes
    if isinstance(x, Atom):
        return x.axes
    return axes_of(x) if isinstance(x, Lin) else frozenset()
