"""Propositions of mask proofs under not, and, or.

Kept simplified as they are made: what the bounds of the axes decide becomes True or False, what a neighbour implies is
dropped. Every rule is exact for integers; nothing here knows floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from optpass.passes.attention.masks.integers import Atom, Int, without
from optpass.passes.attention.masks.literals import (
    Bool,
    Pred,
    at_least_0,
    equals_0,
    excludes,
    follows,
    opposite,
    truth,
)  # fmt: skip

__all__ = [
    "Bool", "Pred", "all_of", "any_of", "choose", "conjuncts", "eq", "ge", "given", "implies", "negate", "rebuild",
    "truth",
]  # fmt: skip

#: More parts than this are not simplified against each other.
_MANY = 12


# ---- comparisons with 0 ---------------------------------------------------------------------------------------------


def ge(x: Int) -> Bool:
    """x >= 0; a maximum, a minimum or a quotient in it becomes comparisons of what it is made of."""
    found = at_least_0(x)
    if isinstance(found, bool) or isinstance(x, int):
        return found
    for atom, factor in x.terms:
        if atom.kind == "call" and atom.args[0] in ("max", "min"):
            rest = without(x, (atom,))
            both = [ge(rest + side * factor) for side in atom.args[2:]]
            either = (atom.args[0] == "max") == (factor > 0)
            return any_of(both) if either else all_of(both)
    divided = [(a, c) for a, c in x.terms if a.kind == "call" and a.args[0] == "floordiv"]
    if len(divided) == 1 and abs(divided[0][1]) == 1 and isinstance(divided[0][0].args[3], int):
        atom, factor = divided[0]
        by: int = atom.args[3]
        if by > 0:  # floor(n / by) >= m  <=>  n >= by·m
            rest = without(x, (atom,)) * by
            return ge(rest + atom.args[2]) if factor > 0 else ge(rest - atom.args[2] + (by - 1))
    return found


def eq(x: Int) -> Bool:
    """x = 0; where it holds a maximum or a minimum, as x >= 0 and -x >= 0."""
    found = equals_0(x)
    if isinstance(found, bool):
        return found
    split = any(a.kind == "call" and a.args[0] in ("max", "min") for a, _ in found.form.terms)
    return all_of((ge(found.form), ge(-found.form))) if split else found


# ---- not, and, or ---------------------------------------------------------------------------------------------------


def negate(p: Bool) -> Bool:
    """not p."""
    if isinstance(p, bool):
        return not p
    if p.negated is None:
        p.negated = _negation(p)
    return p.negated


def _negation(p: Pred) -> Bool:
    if p.op not in ("and", "or"):
        return opposite(p)
    return (any_of if p.op == "and" else all_of)([negate(part) for part in p.parts])


def all_of(parts: Iterable[Bool]) -> Bool:
    """The conjunction."""
    return _join("and", parts)


def any_of(parts: Iterable[Bool]) -> Bool:
    """The disjunction."""
    return _join("or", parts)


def choose(p: Bool, yes: Bool, no: Bool) -> Bool:
    """`yes` where p holds, `no` elsewhere."""
    if isinstance(p, bool):
        return yes if p else no
    if yes == no:
        return yes
    if yes is True:
        return any_of((p, no))
    if yes is False:
        return all_of((negate(p), no))
    if no is True:
        return any_of((negate(p), yes))
    if no is False:
        return all_of((p, yes))
    return any_of((all_of((p, yes)), all_of((negate(p), no))))


def _join(op: str, parts: Iterable[Bool]) -> Bool:
    neutral = op == "and"
    flat: dict[Pred, None] = {}
    for part in parts:
        if isinstance(part, bool):
            if part is not neutral:
                return part
        elif part.op == op:
            flat.update(dict.fromkeys(part.parts))
        else:
            flat[part] = None
    kept = list(flat) if len(flat) > _MANY else _simplified(op, list(flat))
    if isinstance(kept, bool):
        return kept
    if not kept:
        return neutral
    if len(kept) == 1:
        return kept[0]
    # Parts in one order whatever way they came, so that equal conjunctions are equal objects.
    kept.sort(key=_order)
    return Pred(op, tuple(kept), frozenset[str]().union(*(part.axes for part in kept)))


def _order(p: Pred) -> tuple[str, tuple[int, ...], int, str]:
    if p.op in ("and", "or"):
        inner = [_order(part) for part in p.parts]
        return (p.op, tuple(n for key in inner for n in key[1]), len(inner), "".join(key[0] for key in inner))
    if p.op in ("is", "not"):
        return (p.op, (p.atom.serial,), 0, "")
    return (p.op, tuple(n for a, c in p.form.terms for n in (a.serial, c)), p.form.const, "")


def _simplified(op: str, parts: list[Pred]) -> bool | list[Pred]:
    """Parts less what others say already; a bool where they decide the whole."""
    conjunction = op == "and"
    changed = True
    while changed:
        changed = False
        for i, one in enumerate(parts):
            for j in range(i + 1, len(parts)):
                other = parts[j]
                if (_exclude if conjunction else _cover)(one, other):
                    return not conjunction
                drop = _redundant(one, other, conjunction)
                if drop is not None:
                    parts = [p for p in parts if p is not drop]
                    changed = True
                    break
            if changed:
                break
        if changed:
            continue
        met = _met(parts) if conjunction else _joined(parts)
        if isinstance(met, bool):
            return met
        if met is not None:
            parts, changed = met, True
            continue
        for i, one in enumerate(parts):  # what a literal settles inside its neighbours
            if one.op in ("and", "or"):
                continue
            for j, other in enumerate(parts):
                if j != i and other.op in ("and", "or"):
                    new = _given(other, one if conjunction else negate(one))
                    if new != other:
                        rest = [p for k, p in enumerate(parts) if k != j]
                        joined = _join(op, [*rest, new])
                        if isinstance(joined, bool):
                            return joined
                        return list(joined.parts) if joined.op == op else [joined]
    return parts


def _redundant(one: Pred, other: Pred, conjunction: bool) -> Pred | None:
    """Whichever of two parts the other makes superfluous."""
    if implies(one, other):
        return other if conjunction else one
    if implies(other, one):
        return one if conjunction else other
    return None


def implies(p: Pred, q: Pred) -> bool:
    """True where q is seen to hold wherever p does."""
    if p == q:
        return True
    if p.op == "or":
        return all(implies(part, q) for part in p.parts)
    if q.op == "and":
        return all(implies(p, part) for part in q.parts)
    if q.op == "or" and any(implies(p, part) for part in q.parts):
        return True
    if p.op == "and":
        return any(implies(part, q) for part in p.parts)
    return q.op != "or" and follows(p, q)


def _exclude(p: Pred, q: Pred) -> bool:
    """True where the two are seen never to hold together."""
    for one, other in ((p, q), (q, p)):
        if one.op == "or":
            return all(_exclude(part, other) for part in one.parts)
    for one, other in ((p, q), (q, p)):
        if one.op == "and":
            return any(_exclude(part, other) for part in one.parts)
    return excludes(p, q)


def _cover(p: Pred, q: Pred) -> bool:
    """True where one of the two is seen to hold always."""
    not_p, not_q = negate(p), negate(q)
    return isinstance(not_p, Pred) and isinstance(not_q, Pred) and _exclude(not_p, not_q)


def _met(parts: list[Pred]) -> bool | list[Pred] | None:
    """x >= 0 and -x >= 0 as x = 0; x >= 0 and x != 0 as x - 1 >= 0; False where that cannot be; None for neither."""
    for one in parts:
        for other in parts:
            if one.op != "ge" or one is other:
                continue
            if other.op == "ge" and other.form == -one.form:
                new = eq(one.form)
            elif other.op == "ne" and (other.form == one.form or other.form == -one.form):
                new = ge(one.form - 1)
            else:
                continue
            rest = [p for p in parts if p is not one and p is not other]
            if isinstance(new, bool):
                return rest if new else False
            if new not in (one, other):
                return [new, *rest]
    return None


def _joined(parts: list[Pred]) -> bool | list[Pred] | None:
    """The opposite of `_met`: x - 1 >= 0 or x = 0 as x >= 0; x > 0 or x < 0 as x != 0."""
    opposite = [negate(part) for part in parts]
    met = _met([part for part in opposite if isinstance(part, Pred)])
    if met is None or isinstance(met, bool):
        return None if met is None else not met
    found = [negate(part) for part in met]
    return [part for part in found if isinstance(part, Pred)]


def _given(p: Pred, fact: Bool) -> Bool:
    """`p` simplified where `fact`, a single literal, is known to hold."""
    if isinstance(fact, bool):
        return p
    if implies(fact, p):
        return True
    if _exclude(fact, p):
        return False
    if p.op in ("and", "or"):
        new = [_given(part, fact) for part in p.parts]
        return p if all(a is b for a, b in zip(new, p.parts, strict=True)) else _join(p.op, new)
    return p


def given(p: Bool, fact: Bool) -> Bool:
    """`p` simplified where `fact` is known to hold."""
    if isinstance(p, bool) or isinstance(fact, bool):
        return p
    if fact.op == "and":
        for part in fact.parts:
            p = given(p, part)
        return p
    return _given(p, fact)


# ---- rebuilding -----------------------------------------------------------------------------------------------------


def rebuild(p: Bool, form: Callable[[Int], Int], atom: Callable[[Atom], Bool]) -> Bool:
    """`p` with its forms and its unknown truths replaced, simplified anew."""
    if isinstance(p, bool):
        return p
    if p.op in ("and", "or"):
        return _join(p.op, [rebuild(part, form, atom) for part in p.parts])
    if p.op in ("is", "not"):
        return atom(p.atom) if p.op == "is" else negate(atom(p.atom))
    if p.op == "ge":
        return ge(form(p.form))
    return eq(form(p.form)) if p.op == "eq" else negate(eq(form(p.form)))


def conjuncts(p: Bool) -> tuple[Pred, ...]:
    """Parts that must all hold."""
    if isinstance(p, bool):
        return ()
    return p.parts if p.op == "and" else (p,)
