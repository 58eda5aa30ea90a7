"""Sizes of tensors as integer forms, and what is known of them: symbolic sizes become atoms with their ranges.

Never adds a guard: a question that only a guard could answer counts as not known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optpass.passes.attention.masks.atoms import Atoms
from optpass.passes.attention.masks.bounds import extreme, nonneg
from optpass.passes.attention.masks.integers import Int, of_atom, terms_of

#: For each relation of left and right: signs s and shifts d such that s · (left - right) - d >= 0.
_AT_LEAST = {
    "GreaterThan": ((1, 0),),
    "StrictGreaterThan": ((1, 1),),
    "LessThan": ((-1, 0),),
    "StrictLessThan": ((-1, 1),),
    "Equality": ((1, 0), (-1, 0)),
}


class Sizes:
    """The sizes of one graph.

    Attributes:
        atoms: where the atoms of sizes are made.
    """

    def __init__(self, atoms: Atoms) -> None:
        self.atoms = atoms
        self.shape_env: Any = None
        self._forms: dict[Any, Int] = {}
        self._known: dict[Int, bool] = {}
        self._guards = -1
        self._said_by_guards: list[Int] = []

    def form(self, size: int | torch.SymInt) -> Int:
        """A size as a form."""
        if isinstance(size, int):
            return int(size)
        node = size.node
        if self.shape_env is None:
            self.shape_env = getattr(node, "shape_env", None)
        if node.is_constant() or getattr(node, "expr", None) is None:
            constant = node.maybe_as_int()
            return constant if constant is not None else of_atom(self.atoms.make("size", (node,), frozenset()))
        return self._of(node.expr)

    def _of(self, expr: Any) -> Int:
        found = self._forms.get(expr)
        if found is None:
            found = self._forms[expr] = self._convert(expr)
        return found

    def _convert(self, expr: Any) -> Int:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Add:
            total: Int = 0
            for term in expr.args:
                total = total + self._of(term)
            return total
        if expr.is_Mul:
            factor, rest = expr.as_coeff_Mul()
            if factor.is_Integer and factor != 1:
                return self._of(rest) * int(factor)
        low, high = self._range(expr)
        return of_atom(self.atoms.make("size", (expr,), frozenset(), low, high))

    def _range(self, expr: Any) -> tuple[int | None, int | None]:
        if self.shape_env is None:
            return None, None
        found = self.shape_env.bound_sympy(expr)
        return _finite(found.lower), _finite(found.upper)

    def equal(self, one: Int, other: Int) -> bool:
        """True where the two are known to be equal."""
        return one == other or (self.nonneg(one - other) and self.nonneg(other - one))

    def nonneg(self, x: Int) -> bool:
        """True where `x` >= 0 is known for all values of axes, from the graph's own facts about its sizes too."""
        if nonneg(x):
            return True
        low = extreme(x)
        if low is None or len(terms_of(low)) < 2 or self.shape_env is None:
            return False  # of a single size its range says all that is known
        found = self._known.get(low)
        if found is None:
            found = any(nonneg(low - fact) for fact in self._facts())
            found = self._known[low] = found or bool(statically_known_true(self.symint(low) >= 0))
        return found

    def _facts(self) -> list[Int]:
        """Forms of several sizes that the guards of the graph say to be >= 0."""
        guards = self.shape_env.guards
        if self._guards != len(guards):
            self._guards = len(guards)
            found = [fact for guard in guards for fact in self._said(guard.expr)]
            self._said_by_guards = [fact for fact in found if len(terms_of(fact)) > 1]
        return self._said_by_guards

    def _said(self, expr: Any) -> list[Int]:
        kind = type(expr).__name__
        if kind == "And":
            return [fact for part in expr.args for fact in self._said(part)]
        if kind not in _AT_LEAST or not (expr.lhs.is_integer and expr.rhs.is_integer):
            return []
        left = self._of(expr.lhs) - self._of(expr.rhs)
        return [left * sign - strict for sign, strict in _AT_LEAST[kind]]

    def symint(self, x: Int) -> Any:
        """A form over sizes as an int or a SymInt."""
        total: Any = x if isinstance(x, int) else x.const
        for atom, factor in terms_of(x):
            total = total + self.shape_env.create_symintnode(atom.args[0], hint=None) * factor
        return total


def _finite(bound: Any) -> int | None:
    return int(bound) if getattr(bound, "is_Integer", False) else None
