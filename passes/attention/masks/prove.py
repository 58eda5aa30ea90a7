"""Proofs about masks: which scores one keeps, with what it fills the others, whether it can be infinite.

A `Prover` serves one lowered graph: what it found about a Value is kept, so that layers that share a mask share the
proof. Reads Values only; what is done with the facts is the rewrite's affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from optpass.passes.attention.masks.bounds import extreme, numeric
from optpass.passes.attention.masks.elements import Contents, Elements, Index
from optpass.passes.attention.masks.facts import MaskFacts, Namer, name_whole
from optpass.passes.attention.masks.integers import Int, of_atom, terms_of
from optpass.passes.attention.masks.magnitude import magnitude
from optpass.passes.attention.masks.pieces import Expr, Leaf, axes, holds, leaves
from optpass.passes.attention.masks.predicates import Bool, Pred, all_of, conjuncts, negate
from optpass.passes.attention.program.ir import Value

Size = int | torch.SymInt


class Prover:
    """Proofs about the Values of one graph.

    Attributes:
        engine: expressions of elements.
    """

    def __init__(self, contents: Contents | None = None) -> None:
        """Args:
        contents: what an input (a buffer, a parameter) holds at compile time; None where that must not be relied on.
            What a proof took from it is listed in `MaskFacts.buffers`, for a guard.
        """
        self.engine = Elements(contents)
        self._facts: dict[object, MaskFacts] = {}

    def prove(
        self, value: Value, axes: Sequence[str], queries: Size, keys: Size, keep_when: bool = True, truth: bool = False
    ) -> MaskFacts:
        """What a mask does to scores.

        Args:
            value: a bool mask, or numbers that are added to the scores.
            axes: the score axis that each dim of `value` stands along: 'q' for queries, 'k' for keys, other names for
                other axes ('b', 'h'). A dim of size 1 is broadcast, whatever its name.
            queries, keys: lengths of the score axes.
            keep_when: for a bool mask, the value that keeps a score; no matter for numbers that are added.
            truth: take numbers for truths, as `.bool()` does, and not as added to the scores.

        Raises:
            ValueError: two dims have one name, or there are more or fewer names than dims.
        """
        if len(set(axes)) != value.dim or len(axes) != value.dim:
            raise ValueError(f"{value!r} needs one name for each dim, not {tuple(axes)}")
        sizes = self.engine.sizes
        key = (value, tuple(axes), sizes.form(queries), sizes.form(keys), keep_when, truth)
        found = self._facts.get(key)
        if found is None:
            found = self._facts[key] = self._prove(*key)
        return found

    def prove_all(self, masks: Iterable[tuple[Value, Sequence[str], bool]], queries: Size, keys: Size) -> MaskFacts:
        """What several masks keep together: those scores that each of them keeps.

        Args:
            masks: value, axes and keep_when of each, as in `prove`.
            queries, keys: lengths of the score axes.
        """
        each = [self.prove(value, names, queries, keys, keep) for value, names, keep in masks]
        if len(each) == 1:
            return each[0]
        buffers = tuple(dict.fromkeys(buffer for facts in each for buffer in facts.buffers))
        finite = all(facts.finite for facts in each)
        kept = [facts.predicate for facts in each]
        if any(p is None for p in kept):
            return MaskFacts("general", "several masks", finite=finite, buffers=buffers)
        predicate = all_of(p for p in kept if p is not None)
        found = self._named(predicate, self.engine.sizes.form(queries), self.engine.sizes.form(keys))
        return replace(found, finite=finite, buffers=buffers)

    def constant(self, value: Value) -> bool | int | float | None:
        """The one number that all elements of `value` are in every run; None where there is none, or it is NaN.

        Rests on no contents of inputs: those may change between runs. See `constant_now`.
        """
        found, buffers = self.constant_now(value)
        return None if buffers else found

    def constant_now(self, value: Value) -> tuple[bool | int | float | None, tuple[Value, ...]]:
        """The one number that all elements of `value` are, and the Values whose contents must stay for that."""
        index = tuple(self.engine.atoms.axis(f"dim {d}", self.engine.sizes.form(s)) for d, s in enumerate(value.shape))
        with self.engine.watch() as used:
            found: Expr | None = self.engine.element(value, index)
            if not isinstance(found, (bool, int, float)):
                found = self.engine.evaluated(value, index) if value.op is not None else None
        return (found, tuple(used)) if isinstance(found, (bool, int, float)) else (None, ())

    # ---- one mask -------------------------------------------------------------------------------------------------

    def _prove(
        self, value: Value, names: tuple[str, ...], queries: Int, keys: Int, keep: bool, truth: bool
    ) -> MaskFacts:
        index = self._index(value, names, queries, keys)
        if index is None:
            return MaskFacts("general", "a mask whose sizes are not known to be those of the scores", finite=False)
        with self.engine.watch() as used:
            facts = self._of_element(self.engine.element(value, index), value, queries, keys, keep, truth)
            if facts.kind == "general" and value.op is not None:
                real = self.engine.evaluated(value, index)
                if real is not None:
                    facts = self._of_element(real, value, queries, keys, keep, truth)
            if facts.predicate is None and facts.bound is None and value.op is not None:
                facts = self._measured(facts, value)
        return replace(facts, buffers=tuple(used))

    def _measured(self, facts: MaskFacts, value: Value) -> MaskFacts:
        """Of numbers that follow from constants and were computed for real, the largest."""
        data = self.engine.read(value) if value.tensor.is_floating_point() else None
        largest = float(data.detach().abs().amax()) if data is not None and data.numel() else math.inf
        if math.isfinite(largest):
            return replace(facts, bound=largest, finite=True)
        return replace(facts, nan=data is not None and math.isnan(largest))

    def _index(self, value: Value, names: tuple[str, ...], queries: Int, keys: Int) -> Index | None:
        index: list[Int] = []
        for name, size in zip(names, value.shape, strict=True):
            length = self.engine.sizes.form(size)
            whole = {"q": queries, "k": keys}.get(name, length)
            if length == 1:
                index.append(0)
            elif self.engine.sizes.equal(length, whole):
                index.append(self.engine.atoms.axis(name, whole))
            else:
                return None
        return tuple(index)

    def _of_element(self, x: Expr, value: Value, queries: Int, keys: Int, keep: bool, truth: bool) -> MaskFacts:
        if truth:
            x = self.engine.cast(x, value.dtype, torch.bool)
        if isinstance(x, (bool, Pred)):
            return self._named(x if keep else negate(x), queries, keys)
        numbers = list(dict.fromkeys(leaves(x)))
        sizes = [self._size(leaf, value.dtype) for leaf in numbers]
        finite = all(size is not None for size in sizes)
        bound = max((size for size in sizes if size is not None), default=0.0) if finite else None
        constant = [float(leaf) for leaf in numbers if isinstance(leaf, (int, float))]
        known = tuple(sorted(constant)) if len(constant) == len(numbers) else ()
        if not known or (0.0 not in known and len(known) > 1):
            words = "an additive bias" if "q" in axes(x) else "a bias per key"
            kind: Literal["general", "padding"] = "general" if "q" in axes(x) else "padding"
            return MaskFacts(kind, words, values=known, bound=bound, finite=finite)
        facts = self._named(holds(x, lambda leaf: leaf == 0), queries, keys)
        others = [number for number in known if number != 0]
        fill = others[0] if len(others) == 1 else None
        return replace(facts, fill=fill, values=known, bound=bound, finite=finite)

    def _size(self, leaf: Leaf, dtype: torch.dtype) -> float | None:
        """What |leaf| never exceeds; None where it may be infinite or NaN, or is not known."""
        if isinstance(leaf, float):
            return abs(leaf) if math.isfinite(leaf) else None
        return magnitude(self.engine, leaf, dtype)

    # ---- propositions ---------------------------------------------------------------------------------------------

    def _named(self, predicate: Bool, queries: Int, keys: Int) -> MaskFacts:
        kept = [p for p in conjuncts(predicate) if not self._holds(p)]
        if kept:
            predicate = all_of(kept)
        elif predicate is not False:
            predicate = True
        namer = Namer(self.engine, queries, keys)
        facts = name_whole([namer.part(p) for p in conjuncts(predicate)], predicate)
        return replace(facts, row_never_empty=self._never_empty(predicate, queries, keys))

    def _holds(self, p: Bool) -> bool:
        """True where `p` holds for all values of the axes, by all that is known of the sizes."""
        if isinstance(p, bool):
            return p
        if p.op in ("and", "or"):
            return (all if p.op == "and" else any)(self._holds(part) for part in p.parts)
        if p.op == "ge":
            return self._at_least_0(p.form)
        if p.op == "eq":
            return self._at_least_0(p.form) and self._at_least_0(-p.form)
        return p.op == "ne" and (self._at_least_0(p.form - 1) or self._at_least_0(-p.form - 1))

    def _at_least_0(self, x: Int) -> bool:
        low = extreme(x)
        if low is None:
            return False
        top = numeric(low, high=True)
        return (top is None or top >= 0) and self.engine.sizes.nonneg(low)

    def _never_empty(self, predicate: Bool, queries: Int, keys: Int) -> bool:
        """True where some key, the same function of the query for all, is seen to be kept by every query."""
        if isinstance(predicate, bool):
            return predicate
        query, last = self.engine.atoms.axis("q", queries), keys - 1
        for key in (0, query, last, *self._ends(predicate)):
            within = self._at_least_0(key) and self._at_least_0(last - key)
            if within and self._holds(_boolean(self.engine.replace(predicate, {"k": key}))):
                return True
        return False

    @staticmethod
    def _ends(predicate: Pred) -> list[Int]:
        """The keys at which the linear parts of a conjunction begin and end."""
        found: list[Int] = []
        for part in conjuncts(predicate):
            if part.op == "ge":
                for atom, factor in terms_of(part.form):
                    if atom.kind == "axis" and atom.args[0] == "k" and abs(factor) == 1:
                        rest = part.form - of_atom(atom) * factor
                        found.append(rest if factor < 0 else -rest)
        return found


def _boolean(x: Expr) -> Bool:
    assert isinstance(x, (bool, Pred))
    return x
