"""From the second product up to the softmax: what is made of attention weights before they meet the values.

One step for each operation; what it does is noted, and what is not understood ends the walk with the reason. What the
softmax reads is `core`'s and `scores`'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from optpass.passes.attention.axes import (
    Axis,
    Dims,
    above,
    atoms,
    broadcast,
    equal,
    flat,
    fresh,
    resolve,
    same_sizes,
)
from optpass.passes.attention.find import softmaxes, unseen, zeros
from optpass.passes.attention.find.division import Division, division
from optpass.passes.attention.find.operands import FLOATS, PRODUCTS, Constant, Now, product_operands, scaled
from optpass.passes.attention.find.picks import Pick, picked
from optpass.passes.attention.find.pieces import Summed
from optpass.passes.attention.program.ir import Program, Value, arg
from optpass.passes.attention.site import Blocked, Factor, JoinedError, NoSoftmaxError, Number, Operand, SumError

#: How far up from a product a softmax is looked for when its weights cannot be followed: only to say why not.
_LOOK = 8


@dataclass
class Walk:
    """Where the walk from the second product up to the softmax stands, and what it has passed."""

    value: Value
    dims: Dims
    passed: list[Value] = field(default_factory=list)
    dropout: float = 0.0
    dropout_value: Value | None = None
    weight: Number = 1.0
    weights: list[Factor] = field(default_factory=list)
    zeroed: list[tuple[Value, bool]] = field(default_factory=list)
    products: list[Value] = field(default_factory=list)
    numbers: bool = False  #: what is not a number is set to zero
    sliced: Value | None = None  #: the slice that drops the sink's column
    picks: list[Pick] = field(default_factory=list)
    shared: bool = False  #: between several batches of v


def stands_between(value: Value) -> Blocked:
    """What to say of a value that weights are computed through, and that is not understood."""
    if softmaxes.exponential(value):
        return Blocked("exponentials meet v that are not divided by their sum, which is no softmax", value)
    name = value.name or "an operation that is not looked into"
    if not value.name and value.node is not None and value.node.op == "call_function":
        name += f" ({getattr(value.node.target, '__name__', value.node.target)})"
    return Blocked(f"between the softmax and the product with v stands {name}", value)


class Weights:
    """One operand of one product, taken for the attention weights.

    Args:
        program, product: the product and what it is in.
        side: 0 for its left operand, 1 for its right one.
        constant, now, join: see `scores.Reader`.
    """

    def __init__(
        self, program: Program, product: Value, side: int, constant: Constant, now: Now, *, join: bool = True
    ) -> None:
        self.join = join
        self.program, self.product, self.constant, self.now = program, product, constant, now
        self.out_dims = fresh(product.shape)
        self.sides = self.out_dims[-2:]
        operands = product_operands(product)
        (self.inner,) = fresh(operands[0].shape[-1:])
        batch, (rows, columns) = self.out_dims[:-2], self.out_dims[-2:]
        left, right = (*batch, rows, self.inner), (*batch, self.inner, columns)
        self.rows = rows if side == 0 else columns
        self.walk = Walk(operands[side], left if side == 0 else right)
        self.other = Operand(operands[1 - side], right if side == 0 else left)
        self.summed = self.joined = False
        self.finished: Division | None = None

    @classmethod
    def of_pieces(cls, program: Program, found: Summed, constant: Constant, now: Now, *, join: bool = True) -> Self:
        """The weights of a sum of products that is one product."""
        self = cls(program, found.products[0], 0, constant, now, join=join)
        self.product, self.out_dims, self.sides, self.rows = found.total, found.dims, found.sides, found.sides[0]
        self.inner, self.other, self.summed, self.joined = (found.keys,), found.values, True, True
        self.walk = Walk(found.weights.value, found.weights.dims, [*found.passed])
        return self

    @property
    def keys(self) -> tuple[Axis, ...]:
        return atoms(self.inner)

    # ---- from the product up to the softmax -------------------------------------------------------------------

    def to_softmax(self) -> tuple[Value, Dims, Value]:
        """The softmax's input, its axes, and the softmax."""
        walk = self.walk
        while True:
            value = walk.value
            found = self._softmax_at(value)
            if found is not None:
                walk.passed.append(value)
                return found
            if not self._step(value):
                if self._softmax_above(value):
                    part = picked(value, walk.dims)
                    if part is not None and part[2].part in self.keys:
                        raise Blocked("v is of some of the keys that the softmax runs over, not of all", value)
                    raise stands_between(value)
                raise NoSoftmaxError
            walk.passed.append(value)

    def _step(self, value: Value) -> bool:
        walk = self.walk
        step = above(value, walk.dims)
        if step is not None:
            lost = set(flat(walk.dims)) - set(flat(step[1]))
            if lost & {*self.keys, *atoms(self.rows)} or not lost <= set(flat(self.other.dims)):
                return False  # what is left are batches of v that share weights
            walk.shared = walk.shared or bool(lost)
            walk.value, walk.dims = step
            return True
        if value.name == "cat" and self._joined(value):
            raise JoinedError(value)
        source = value.args[0] if value.args and isinstance(value.args[0], Value) else None
        if source is None:
            return False
        if value.name == "_to_copy" and source.dtype in FLOATS and value.dtype in FLOATS:
            walk.value = source
            return True
        if value.name == "native_dropout" and value.index == 0 and walk.dropout_value is None and not walk.shared:
            walk.value, walk.dropout, walk.dropout_value = source, float(value.args[1]), value
            return True
        found = zeros.read(value, self._number)
        if found is not None:
            return self._set_to_zero(found)
        if value.name == "neg":
            walk.value, walk.weight = source, walk.weight * -1.0
            return True
        if value.name == "nan_to_num" and value.args[1] in (None, 0):  # the infinities that it replaces no weight is
            walk.value, walk.numbers = source, True
            return True
        if value.name == "slice" and walk.sliced is None and self._drop_column(value, source):
            return True
        if value.name in ("add", "sub", "rsub") and self._summed(value):
            raise SumError(value)
        return self._picked(value) or (value.name in ("mul", "div") and self._multiplied(value))

    def _summed(self, value: Value) -> bool:
        """Whether softmaxes lead to both sides of an addition."""
        sides = [a for a in value.args[:2] if isinstance(a, Value) and same_sizes(a.shape, value.shape)]
        number = isinstance(arg(value, "alpha"), (int, float)) and arg(value, "alpha") != 0
        return number and len(sides) == 2 and all(a.dtype == value.dtype and self._softmax_above(a) for a in sides)

    def _joined(self, value: Value) -> bool:
        """Whether parts that softmaxes lead to make up the keys of `value`, one behind the other."""
        parts = value.args[0]
        sizes = [part.shape[value.args[1]] for part in parts]
        known = all(isinstance(size, int) and size > 1 for size in sizes)
        whole = len(self.keys) == 1 and atoms(self.walk.dims[value.args[1]]) == self.keys and self.walk.sliced is None
        return whole and known and all(p.dtype == value.dtype and self._softmax_above(p) for p in parts)

    def _picked(self, value: Value) -> bool:
        """Some of the heads or rows."""
        found = picked(value, self.walk.dims)
        if found is None:
            return False
        source, dims, pick = found
        kept = set(flat(dims)) - {pick.axis} | ({pick.part} if pick.part is not None else set())
        if not set(self.keys) <= kept or pick.part in self.keys or kept != set(flat(self.walk.dims)):
            return False
        self.walk.value, self.walk.dims = source, dims
        self.walk.picks.append(pick)
        return True

    def _set_to_zero(self, found: zeros.Zeros) -> bool:
        """Of masked keys, where they are not numbers, or in whole rows: there it is the result that is set to zero."""
        walk, dims = self.walk, broadcast(self.walk.dims, found.mask.shape)
        walk.value = found.source
        if of_nan := found.of_nan():
            walk.numbers = True
            walk.passed.extend(of_nan)
        elif set(flat(dims)) & set(self.keys):
            walk.zeroed.append((found.mask, found.hides))
        else:
            walk.weights.append(Factor(Operand(found.mask, dims), inverse=found.hides, zeroes=True))
        return True

    def _number(self, item: Any) -> Any:
        return self.constant(item) if isinstance(item, Value) else item

    def _multiplied(self, value: Value) -> bool:
        """Weights times a number, or a tensor that is the same for all keys: it moves behind the product with v."""
        walk = self.walk
        number, source = scaled(value, self.constant)
        if number is not None and source is not None:
            walk.value, walk.weight = source, walk.weight * number
            return True
        if walk.numbers or (arg(value, "rounding_mode") if value.name == "div" else False):
            return False
        for source, other in ((value.args[0], value.args[1]), (value.args[1], value.args[0])):
            if not isinstance(source, Value) or not isinstance(other, Value) or source.dim != value.dim:
                continue
            if (value.name == "div" and source is not value.args[0]) or not self._softmax_above(source):
                continue
            dims = broadcast(walk.dims, other.shape)
            if set(flat(broadcast(walk.dims, source.shape))) != set(flat(walk.dims)):
                continue
            if set(flat(dims)) & set(self.keys):
                mask = zeros.factor(other) if value.name == "mul" else None
                if mask is None:
                    raise Blocked(zeros.MULTIPLIED, value)
                walk.products.append(mask)
                walk.value = source
                return True
            walk.weights.append(Factor(Operand(other, dims), inverse=value.name == "div"))
            walk.value = source
            return True
        return False

    def _drop_column(self, value: Value, source: Value) -> bool:
        """`weights[..., :-1]` or `weights[..., 1:]`: the softmax had one more column than there are keys."""
        _, dim, start, _, step = value.args
        dim %= value.dim
        more = equal(source.shape[dim], value.shape[dim] + 1)
        if step != 1 or start not in (0, None, 1) or not more or atoms(self.walk.dims[dim]) != self.keys:
            return False
        self.front = start == 1
        dims = list(self.walk.dims)
        dims[dim] = (Axis(source.shape[dim]),)
        self.walk.value, self.walk.dims, self.walk.sliced = source, tuple(dims), value
        self.wide = dims[dim]
        return True

    # ---- the spellings of softmax -----------------------------------------------------------------------------

    def _softmax_at(self, value: Value) -> tuple[Value, Dims, Value] | None:
        """The input of the softmax that `value` is; None if it is none."""
        found = softmaxes.read(value, self.constant) or self._finished_behind(value)
        if found is None:
            return None
        dims, dim = resolve(self.walk.dims), found.dim % value.dim
        wanted = atoms(self.wide) if self.walk.sliced is not None else self.keys
        if dims[dim] != wanted and set(dims[dim]) != set(wanted):
            raise Blocked("the softmax runs over another dim than the one that is summed with v", value)
        self.walk.passed.extend(found.values)
        self.spelled = found
        return found.logits, dims, value

    def _finished_behind(self, value: Value) -> softmaxes.Softmax | None:
        """Exponentials whose product with v is divided by their sums."""
        if (
            self.summed
            or self.walk.sliced is not None
            or self.walk.picks
            or not softmaxes.made_of_exponentials(value, self.constant)
        ):
            return None
        found = division(self.product, self.out_dims, value, self.walk.dims, self.program, self.constant)
        if found is None:
            return None
        self.finished = found
        self.walk.passed.extend(found.values)
        return softmaxes.unfinished(value, found.dim, self.constant)

    # ---- looking ahead ----------------------------------------------------------------------------------------

    def may_be_weights(self, value: Value) -> bool:
        return value.dtype in FLOATS and self._softmax_above(value)

    def _softmax_above(self, value: Value) -> bool:
        """Whether a softmax (in any spelling) is a few operations other than products up from `value`."""
        level, seen = [value], {value}
        for _ in range(_LOOK):
            following: list[Value] = []
            for item in level:
                if (
                    item.name in ("_softmax", "_log_softmax")
                    or softmaxes.exponential(item)
                    or unseen.made(self.program, item)
                ):
                    return True
                for source in () if item.name in PRODUCTS else unseen.sources_of(self.program, item):
                    if source not in seen:
                        seen.add(source)
                        following.append(source)
            level = following
        return False
