"""The element of a Value at symbolic indices, as an expression: the engine that the rules of single operations run in.

What no rule knows becomes an unknown: an element of that Value at those indices, or the operation applied to unknown
operands, so that what it depends on stays visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

from optpass.passes.attention.masks import contents, numbers
from optpass.passes.attention.masks.atoms import Atoms
from optpass.passes.attention.masks.evaluate import evaluate, fold, plain
from optpass.passes.attention.masks.integers import Atom, Int, Lin, axes_of, of_atom, substitute
from optpass.passes.attention.masks.pieces import Expr, Leaf, TooManyPiecesError, Where, axes, lift, where
from optpass.passes.attention.masks.predicates import Pred, negate, rebuild, truth
from optpass.passes.attention.masks.sizes import Sizes
from optpass.passes.attention.program.ir import Value

Index: TypeAlias = tuple[Int, ...]
Contents: TypeAlias = Callable[[Value], torch.Tensor | None]

#: Chains of operations longer than this end in an unknown.
_DEEPEST = 60
_DIVISIONS = ("div", "floor_divide", "remainder", "trunc")


class UnknownError(Exception):
    """A rule cannot say what the element is."""


class Elements:
    """Elements of the Values of one graph.

    Attributes:
        atoms, sizes: unknowns and sizes of the graph.
    """

    def __init__(self, real: Contents | None = None) -> None:
        self.atoms = Atoms()
        self.sizes = Sizes(self.atoms)
        self._real = real or (lambda _value: None)
        self._known: dict[tuple[Value, Index], tuple[Expr, frozenset[Value]]] = {}
        self._formulas: dict[Value, contents.Formula | None] = {}
        self._data: dict[Value, torch.Tensor | None] = {}
        self._used: set[Value] = set()
        self._depth = 0

    # ---- elements -------------------------------------------------------------------------------------------------

    def element(self, value: Value, index: Index) -> Expr:
        """value[index]; each index must lie within its dim."""
        key = (value, index)
        known = self._known.get(key)
        if known is None:
            with self.watch() as used:
                self._depth += 1
                try:
                    found = self._element(value, index) if self._depth <= _DEEPEST else None
                except (UnknownError, TooManyPiecesError):
                    found = None
                finally:
                    self._depth -= 1
            if found is None:
                found = self.unknown(value, index)
            known = self._known[key] = (found, frozenset(used))
        self._used |= known[1]
        return known[0]

    @contextmanager
    def watch(self) -> Iterator[set[Value]]:
        """The Values whose contents are looked at meanwhile."""
        outer, self._used = self._used, set()
        try:
            yield self._used
        finally:
            outer |= self._used
            self._used = outer

    def _element(self, value: Value, index: Index) -> Expr | None:
        from optpass.passes.attention.masks.rules import RULES, generic

        if value.op is None:
            return self._of_contents(value, index)
        found: Expr | None = None
        rule = RULES.get(value.name) if value.op.namespace in ("aten", "prims") else None
        if rule is not None:
            with suppress(UnknownError):
                found = rule(self, value, index)
        if found is None:
            found = generic(self, value, index)
        return found if found is not None else self.evaluated(value, index)

    def unknown(self, value: Value, index: Index) -> Expr:
        """An element that nothing is known of but where it stands."""
        names = frozenset[str]().union(*map(axes_of, index))
        low, high = numbers.RANGES.get(value.dtype, (None, None))
        return self._typed(self.atoms.make("elem", (value, index), names, low, high), value.dtype)

    def apply(self, function: Any, dtype: torch.dtype, *operands: Expr) -> Expr:
        """An operation of leaves and Bools that cannot be simplified; `dtype` is that of the result."""
        if function in _DIVISIONS and operands[1] == 0:
            raise UnknownError  # the sign of a zero is not kept, and here it would matter
        names = frozenset[str]().union(*map(axes, operands))
        low, high = numbers.RANGES.get(dtype, (None, None))
        kinds = tuple(type(x) for x in operands)  # so that 1, 1.0 and True stay apart
        return self._typed(self.atoms.make("apply", (function, dtype, kinds, *operands), names, low, high), dtype)

    @staticmethod
    def _typed(atom: Atom, dtype: torch.dtype) -> Expr:
        if dtype == torch.bool:
            return truth(atom)
        return of_atom(atom) if dtype in numbers.RANGES else atom

    # ---- contents -------------------------------------------------------------------------------------------------

    def data(self, value: Value) -> torch.Tensor | None:
        """What a leaf holds, where that is known."""
        if value not in self._data:
            real = value.real if value.leaf == "constant" and value.version == 0 else None
            if real is None and value.leaf in ("input", "constant") and value.version == 0:
                real = self._real(value)
            self._data[value] = real if real is not None and plain(real, value) else None
        found = self._data[value]
        if found is not None and value.leaf != "constant":
            self._used.add(value)
        return found

    def read(self, value: Value) -> torch.Tensor | None:
        """What a Value holds, where it is a leaf whose contents are known or follows from constants alone."""
        return self.data(value) if value.op is None else self._evaluate(value)

    def _evaluate(self, value: Value) -> torch.Tensor | None:
        if value not in self._data:
            self._data[value] = evaluate(value)
        return self._data[value]

    def _of_contents(self, value: Value, index: Index) -> Expr | None:
        return self._of_data(value, index, self.data)

    def evaluated(self, value: Value, index: Index) -> Expr | None:
        """The element where the whole Value follows from constants and is computed for real."""
        return self._of_data(value, index, self._evaluate)

    def _of_data(self, value: Value, index: Index, read: Callable[[Value], torch.Tensor | None]) -> Expr | None:
        data = read(value)
        if data is None:
            return None
        if value not in self._formulas:
            self._formulas[value] = contents.formula(data)
        found = self._formulas[value]
        if found is not None:
            return found(index)
        if all(isinstance(i, int) and 0 <= i < size for i, size in zip(index, data.shape, strict=True)):
            return contents.number(data[index].item())  # type: ignore[index]
        return None

    # ---- operands -------------------------------------------------------------------------------------------------

    def operand(self, value: Value, operand: Any, index: Index) -> Expr:
        """The element of a tensor operand that broadcasts to the shape of `value`; or a Python number."""
        if isinstance(operand, Value):
            return self.element(operand, self.broadcast(operand, value.shape, index))
        return self.number(operand)

    def number(self, item: Any) -> Expr:
        """A Python number, or a symbolic int."""
        if isinstance(item, torch.SymInt):
            return self.sizes.form(item)
        found = contents.number(item)
        if found is None:
            raise UnknownError
        return found

    def broadcast(self, operand: Value, shape: Sequence[Any], index: Index) -> Index:
        """Indices into an operand whose shape broadcasts to `shape`."""
        skipped = len(index) - operand.dim
        return tuple(self.along(operand.shape[d], shape[d + skipped], index[d + skipped]) for d in range(operand.dim))

    def along(self, size: Any, whole: Any, index: Int) -> Int:
        """The index into a dim of `size` that is broadcast to `whole`."""
        if isinstance(size, int) and size == 1:
            return 0
        if not self.sizes.equal(self.sizes.form(size), self.sizes.form(whole)):
            raise UnknownError
        return index

    def cast(self, x: Expr, source: torch.dtype, target: torch.dtype) -> Expr:
        """An element of dtype `source` as `target`."""
        if source == target:
            return x
        if isinstance(x, (bool, Pred)):
            if target in numbers.DIGITS:
                return where(x, 1.0, 0.0)
            return where(x, 1, 0) if target in numbers.RANGES else self._to(x, target)
        if target == torch.bool:
            return negate_all(self.compare("eq", x, 0.0 if source in numbers.DIGITS else 0, source))
        return lift(lambda leaf: _or(numbers.cast(leaf, source, target), lambda: self._to(leaf, target)), [x])

    def _to(self, x: Expr, target: torch.dtype) -> Expr:
        return self.apply("to", target, x)

    def compare(self, name: str, x: Expr, y: Expr, dtype: torch.dtype) -> Expr:
        """A comparison of two numbers of one dtype."""
        return lift(lambda a, b: _or(numbers.compare(name, a, b, dtype), lambda: self._compared(name, a, b)), [x, y])

    def _compared(self, name: str, x: Expr, y: Expr) -> Expr:
        if name == "ne":  # also where NaN is involved
            return negate_all(self._compared("eq", x, y))
        if name in ("gt", "ge"):
            return self._compared({"gt": "lt", "ge": "le"}[name], y, x)
        return self.apply(name, torch.bool, x, y)

    def arithmetic(self, name: str, x: Expr, y: Expr, dtype: torch.dtype) -> Expr:
        """An operation on two numbers of `dtype`."""

        def leaf(a: Leaf, b: Leaf) -> Expr:
            exact = numbers.arithmetic(name, a, b, dtype, self.atoms)
            return self.apply(name, dtype, a, b) if exact is None else exact

        return lift(leaf, [x, y])

    # ---- substitution ---------------------------------------------------------------------------------------------

    def replace(self, x: Expr, by: Mapping[str, Int]) -> Expr:
        """`x` with axes replaced; the replacements must lie within the sizes of the axes they stand for."""
        if axes(x).isdisjoint(by):
            return x
        if isinstance(x, Pred):
            return rebuild(x, lambda form: self._form(form, by), lambda atom: _bool(self._atom(atom, by)))
        if isinstance(x, Where):
            return where(_bool(self.replace(x.pred, by)), self.replace(x.yes, by), self.replace(x.no, by))
        if isinstance(x, Atom):
            return self._atom(x, by)
        return self._form(x, by) if isinstance(x, Lin) else x

    def _form(self, x: Int, by: Mapping[str, Int]) -> Int:
        return substitute(x, by, lambda atom: _int(self._atom(atom, by)))

    def _atom(self, atom: Atom, by: Mapping[str, Int]) -> Expr:
        if atom.kind == "elem":
            value, index = atom.args
            return self.unknown(value, tuple(self._form(i, by) for i in index))
        if atom.kind == "call":
            function, _, *forms = atom.args
            return self.atoms.call(function, *(self._form(f, by) for f in forms))
        function, dtype, _, *operands = atom.args
        return self.apply(function, dtype, *(self.replace(x, by) for x in operands))

    def folded(self, value: Value, operands: Sequence[Expr], args: Sequence[Any]) -> Expr | None:
        """A pointwise operation on constants, computed by torch itself."""
        if not all(isinstance(x, (bool, int, float)) for x in operands):
            return None
        result = fold(value, list(operands), args)
        return None if result is None else contents.number(result)


def negate_all(x: Expr) -> Expr:
    """not x, of a Bool."""
    return negate(_bool(x))


def _or(found: Expr | None, otherwise: Callable[[], Expr]) -> Expr:
    return otherwise() if found is None else found


def _bool(x: Expr) -> bool | Pred:
    assert isinstance(x, (bool, Pred))
    return x


def _int(x: Expr) -> Int:
    assert isinstance(x, (int, Lin))
    return x
