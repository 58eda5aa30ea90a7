"""A proved predicate as graph nodes over index tensors: the `mask_mod(b, h, q, k)` that FlexAttention asks for.

Emits nodes only; which tensors are captured and under which names the axes come in, the caller says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx

from optpass.passes.attention.masks.elements import Elements
from optpass.passes.attention.masks.integers import Atom, Int, Lin, const_of, terms_of
from optpass.passes.attention.masks.pieces import Expr, Where
from optpass.passes.attention.masks.predicates import Bool, Pred
from optpass.passes.attention.program.ir import Value

_NAMED: dict[str, Any] = {
    "eq": operator.eq, "lt": operator.lt, "le": operator.le, "add": operator.add, "sub": operator.sub,
    "mul": operator.mul, "div": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
}  # fmt: skip
_COMPARED = {"ge": operator.ge, "eq": operator.eq, "ne": operator.ne}


class NotEmittableError(Exception):
    """The predicate holds something that cannot be computed from indices, as the text says."""


class Emitter:
    """Makes nodes in one graph.

    Attributes:
        graph: where the nodes go.
        axes: for each axis name a node that is a 0-d integer tensor (or broadcasts), or an int.
    """

    def __init__(
        self, engine: Elements, graph: fx.Graph, axes: Mapping[str, fx.Node | int],
        tensor: Callable[[Value], fx.Node | None], size: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        """Args:
        engine: `Prover.engine`, which made the predicate.
        graph: where the nodes go.
        axes: a node or a number for each axis name.
        tensor: the node that holds a Value; None where there is none.
        size: the node or number of a SymInt.
        """
        self.engine, self.graph, self.axes, self._tensor, self._size = engine, graph, axes, tensor, size
        self._made: dict[Any, Any] = {}

    def predicate(self, p: Bool) -> Any:
        """A node that is True where the predicate holds; a bool where that is the same everywhere.

        Raises:
            NotEmittableError: where it reads out of range, or what `tensor` has no node for.
        """
        if isinstance(p, bool):
            return p
        if p.op in ("and", "or"):
            return reduce(
                lambda a, b: self._call(operator.and_ if p.op == "and" else operator.or_, a, b),
                [self.predicate(part) for part in p.parts],
            )
        if p.op in ("is", "not"):
            found = self._atom(p.atom)
            return found if p.op == "is" else self._call(torch.logical_not, found)
        # Each side a sum of positive terms: nothing overflows that the axes and sizes do not.
        left, right = self._sum(p.form, 1), self._sum(p.form, -1)
        return self._call(_COMPARED[p.op], left, right)

    def _sum(self, form: Lin, sign: int) -> Any:
        total: Any = max(form.const * sign, 0)
        for atom, factor in form.terms:
            if factor * sign > 0:
                term = self._atom(atom)
                term = term if abs(factor) == 1 else self._call(operator.mul, term, abs(factor))
                total = term if isinstance(total, int) and total == 0 else self._call(operator.add, total, term)
        return total

    def _form(self, x: Int) -> Any:
        total: Any = const_of(x)
        for atom, factor in terms_of(x):
            term = self._atom(atom)
            term = term if factor == 1 else self._call(operator.mul, term, factor)
            total = term if isinstance(total, int) and total == 0 else self._call(operator.add, total, term)
        return total

    def _atom(self, atom: Atom) -> Any:
        found = self._made.get(atom)
        if found is None:
            found = self._made[atom] = self._make(atom)
        return found

    def _make(self, atom: Atom) -> Any:
        if atom.kind == "axis":
            if atom.args[0] not in self.axes:
                raise NotEmittableError(f"no index for the axis {atom.args[0]}")
            return self.axes[atom.args[0]]
        if atom.kind == "size":
            return self._size(self.engine.sizes.symint(Lin(0, ((atom, 1),))))
        if atom.kind == "elem":
            return self._element(*atom.args)
        if atom.kind == "call":
            function, _, x, y = (*atom.args[:2], *map(self._form, atom.args[2:]))
            if function in ("max", "min"):
                larger = self._call(operator.ge, x, y)
                return self._call(torch.where, larger, *((x, y) if function == "max" else (y, x)))
            return self._call({"floordiv": operator.floordiv, "mod": operator.mod, "mul": operator.mul}[function], x, y)
        return self._applied(*atom.args)

    def _element(self, value: Value, index: tuple[Int, ...]) -> Any:
        node = self._tensor(value)
        if node is None:
            raise NotEmittableError(f"no node holds {value!r}")
        sizes = self.engine.sizes
        for place, size in zip(index, value.shape, strict=True):
            if not (sizes.nonneg(place) and sizes.nonneg(sizes.form(size) - 1 - place)):
                raise NotEmittableError(f"{value!r} may be read out of range")
        return self._call(operator.getitem, node, tuple(self._form(place) for place in index)) if index else node

    def _applied(self, function: Any, dtype: torch.dtype, _kinds: Any, *operands: Expr) -> Any:
        nodes = [self._expression(x) for x in operands]
        if function == "to" and isinstance(nodes[0], fx.Node):
            return self.graph.call_method("to", (nodes[0], dtype))
        if not isinstance(function, str) or function not in _NAMED:
            raise NotEmittableError(f"{function if isinstance(function, str) else function[0].name()} is not emitted")
        if not _keeps(dtype, operands):
            raise NotEmittableError(f"{function} of numbers whose dtype the nodes would not have")
        return self._call(_NAMED[function], *nodes)

    def _expression(self, x: Expr) -> Any:
        if isinstance(x, (bool, int, float)):
            return x
        if isinstance(x, Lin):
            return self._form(x)
        if isinstance(x, (Pred, Where)):
            raise NotEmittableError("an operation on a truth")
        return self._atom(x)

    def _call(self, function: Any, *args: Any) -> Any:
        if not any(isinstance(a, (fx.Node, tuple)) for a in args):
            return function(*args)
        return self.graph.call_function(function, args)


def _keeps(dtype: torch.dtype, operands: tuple[Expr, ...]) -> bool:
    """True where type promotion gives the nodes of an operation the dtype that it was proved for."""
    if dtype == torch.bool or dtype.is_floating_point:
        return any(isinstance(x, Atom) for x in operands)
    return all(isinstance(x, int) or _element_of(x, dtype) for x in operands)


def _element_of(x: Expr, dtype: torch.dtype) -> bool:
    """True for an unknown integer as its tensor holds it: arithmetic on it overflows as that dtype does."""
    if not isinstance(x, Lin) or x.const or len(x.terms) != 1:
        return False
    (atom, factor), *_ = x.terms
    return factor == 1 and atom.kind == "elem" and atom.args[0].dtype == dtype
