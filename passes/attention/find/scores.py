"""The score chain: from what the softmax reads back to the product q kᵀ, as scale, factors, biases, fills, softcaps.

Every operation between the two is either understood exactly or blocks the site, with its name in the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from optpass.passes.attention.axes import Axis, Dims, above, atoms, broadcast, flat, fresh, resolve
from optpass.passes.attention.find import factors, fills, sums
from optpass.passes.attention.find.fills import not_floored, not_rounded_off, rounded, unknown
from optpass.passes.attention.find.operands import (
    FLOATS,
    PRODUCTS,
    Constant,
    Now,
    exact_cast,
    peel,
    product_operands,
)
from optpass.passes.attention.find.picks import apply_picks, picked
from optpass.passes.attention.find.pieces import beside
from optpass.passes.attention.program.ir import Value
from optpass.passes.attention.site import Blocked, Operand, Scores, Softcap


class Reader:
    """Reads one score chain.

    Args:
        keys: axes that the softmax runs over.
        every: all axes of the scores, in atoms as they are now.
        constant: the one number that all elements of a value are; None where there is none.
        now: the same of what a value holds now, and the tensors that must go on holding it.
        join: products that are added to the first become one with it.
    """

    def __init__(
        self,
        keys: tuple[Axis, ...],
        every: Callable[[], tuple[Axis, ...]],
        constant: Constant,
        now: Now,
        *,
        join: bool = True,
    ) -> None:
        self.join = join
        self._keys, self._every, self.constant, self.now = keys, every, constant, now
        self._blocked: dict[Value, Blocked] = {}

    scaled_by = staticmethod(factors.scaled_by)

    @property
    def keys(self) -> tuple[Axis, ...]:
        return atoms(self._keys)

    def read(self, value: Value, dims: Dims) -> Scores:
        """The normal form of `value`, whose dims run over `dims`; raises `Blocked`."""
        if value in self._blocked:  # sums of sums would otherwise be read again from each of them
            raise self._blocked[value]
        try:
            return self._read(value, dims)
        except Blocked as blocked:
            self._blocked[value] = blocked
            raise

    def _read(self, value: Value, dims: Dims) -> Scores:
        step = above(value, dims)
        if step is not None:
            if set(flat(step[1])) != set(flat(dims)):
                raise Blocked("scores are broadcast (expanded) before the softmax", value)
            scores = self.read(*step)
        elif value.name in PRODUCTS:
            return self._product(value, dims)
        else:
            rule = _RULES.get(value.name)
            if rule is None:
                raise Blocked(unknown(value), value)
            scores = rule(self, value, dims)
        scores.values.append(value)
        return scores

    # ---- the product ------------------------------------------------------------------------------------------

    def _product(self, value: Value, dims: Dims) -> Scores:
        if value.dtype not in FLOATS:
            raise Blocked(f"queries and keys are multiplied in {value.dtype}", value)
        dims = resolve(dims)
        left, right = product_operands(value)
        (inner,) = fresh(left.shape[-1:])
        if not inner:
            raise Blocked("the product sums over a dim of size 1", value)
        rows, columns, batch = dims[-2], dims[-1], dims[:-2]
        keys = set(self.keys)
        if keys <= set(columns):  # the rest of them tells keys apart that all queries have in common
            query, key = Operand(left, (*batch, rows, inner)), Operand(right, (*batch, inner, columns))
            side = rows
        elif keys <= set(rows):
            query, key = Operand(right, (*batch, inner, columns)), Operand(left, (*batch, rows, inner))
            side = columns
        else:
            raise Blocked("the softmax does not run over exactly one side of a product", value)
        missing = set(self._every()) - set(flat(dims))
        if missing:
            raise Blocked("the product lacks an axis of the scores", value)
        query, a = peel(query, self.constant, grad=value.grad)
        key, b = peel(key, self.constant, grad=value.grad)
        scores = Scores(query, key, value, side, inner, a * b, dtypes=[value.dtype], values=[value])
        scores.steps += [("query", a), ("key", b)]
        if value.name in ("baddbmm", "addmm"):
            sums.with_input(self, scores, value, dims)
        return scores

    # ---- what stands between product and softmax --------------------------------------------------------------

    def _cast(self, value: Value, dims: Dims) -> Scores:
        source = value.args[0]
        if source.dtype not in FLOATS or value.dtype not in FLOATS:
            raise Blocked(f"scores are cast from {source.dtype} to {value.dtype}", value)
        if value.dtype == torch.float16 and source.dtype != torch.float16:
            raise Blocked("scores are cast to float16, where larger ones become infinite", value)
        scores = self.read(source, dims)
        if not exact_cast(source.dtype, value.dtype):
            not_floored(scores, value)
        not_rounded_off(scores, value)
        scores.dtypes.append(value.dtype)
        if scores.biases:  # a sum with a large number is rounded once more, as if it were made in this dtype
            scores.added_in.append(value.dtype)
            sums.then(scores, sums.rounding(value.dtype))
            scores.largest = min(scores.largest, torch.finfo(value.dtype).max)
        scores.fills = [replace(f, fill=rounded(f.fill, value.dtype)) for f in scores.fills]
        return scores

    def _part(self, value: Value, dims: Dims) -> Scores:
        """Scores of some of the queries, heads or keys are those of that part of each operand."""
        found = picked(value, dims)
        if found is None:
            raise Blocked(unknown(value), value)
        source, whole, pick = found
        keys = tuple(pick.axis if axis is pick.part else axis for axis in self.keys)
        reader = Reader(keys, lambda: flat(whole), self.constant, self.now, join=self.join)
        scores = reader.read(source, whole)
        if scores.topped:
            raise Blocked("a part is taken of masked or biased scores that their maximum was taken off", value)
        not_floored(scores, value)
        apply_picks(scores, [pick])
        scores.centred = False  # the maximum may be of a key that is no part
        return scores

    def _beside(self, value: Value, dims: Dims) -> Scores:
        """Scores of several products over keys of their own, one behind the other."""
        dims, at = resolve(dims), value.args[1] % value.dim
        if dims[at] != self.keys or len(self.keys) != 1:
            raise Blocked(unknown(value), value)
        parts = []
        for part in value.args[0]:
            (own,) = fresh(part.shape[at : at + 1])
            if not own or part.dtype != value.dtype:
                raise Blocked(unknown(value), value)
            inner = (*dims[:at], own, *dims[at + 1 :])
            reader = Reader(own, partial(flat, inner), self.constant, self.now, join=self.join)
            parts.append((reader.read(part, inner), own[0]))
        return beside(parts, self.keys[0], value, dims)

    def _tanh(self, value: Value, dims: Dims) -> Scores:
        scores = self.read(value.args[0], dims)
        not_floored(scores, value)
        if scores.fills or scores.biases or scores.softcaps or scores.shifted:
            raise Blocked("tanh of scores that are masked, biased or capped already", value)
        scores.softcaps.append(Softcap(scores.scale))
        scores.steps.append(("cap", 1.0))
        scores.scale = 1.0
        return scores

    def either(self, value: Value, dims: Dims) -> tuple[Scores, Operand, bool]:
        """The operand of a binary operation that leads to the product, the other one, and whether they are swapped."""
        left, right = value.args[0], value.args[1]
        first: Blocked | None = None
        for source, other in ((left, right), (right, left)):
            if not isinstance(source, Value) or len(source.shape) != len(value.shape):
                continue
            if broadcast(dims, source.shape) != dims and set(flat(broadcast(dims, source.shape))) != set(flat(dims)):
                continue
            try:
                scores = self.read(source, dims)
            except Blocked as blocked:
                first = first or blocked
                continue
            if not isinstance(other, Value):
                raise Blocked(unknown(value), value)
            return scores, Operand(other, broadcast(dims, other.shape)), source is right
        raise first or Blocked("no operand leads to a product of queries and keys", value)


_RULES: dict[str, Callable[[Reader, Value, Dims], Scores]] = {
    "_to_copy": Reader._cast, "mul": factors.scale, "div": factors.scale, "neg": factors.neg, "add": sums.add,
    "sub": sums.add, "rsub": sums.add, "masked_fill": fills.masked_fill, "where": fills.where,
    "index_put": fills.index_put, "tanh": Reader._tanh, "cat": Reader._beside, "addcmul": sums.addcmul,
    "maximum": fills.maximum, "clamp": fills.clamp, "clamp_min": fills.clamp, "clamp_max": fills.clamp,
    "slice": Reader._part, "select": Reader._part, "split": Reader._part, "split_with_sizes": Reader._part,
    "chunk": Reader._part, "unbind": Reader._part,
}  # fmt: skip
