"""Finding attention: a product of weights and values, the softmax behind the weights, the scores behind the softmax.

The search starts at every matrix product and looks backwards; what an operand is called or how it is laid out plays no
part. `scores` reads the chain between the two products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from optpass.passes.attention.axes import Axis, Dims, above, atoms, broadcast, equal, flat, fresh, is_one, resolve
from optpass.passes.attention.ir import Program, Value, arg
from optpass.passes.attention.operands import (
    FLOATS,
    PRODUCTS,
    Constant,
    Now,
    exact_cast,
    peel,
    product_operands,
    row_maximum_values,
    scaled,
    shifts_rows,
)
from optpass.passes.attention.scores import Reader
from optpass.passes.attention.sinks import appended, behind
from optpass.passes.attention.site import Blocked, Factor, Number, Operand, Site

#: How far up from a product a softmax is looked for when its weights cannot be followed: only to say why not.
_LOOK = 8


@dataclass
class Found:
    """A product that looks like an attention's second: the site, or why it is none."""

    product: Value
    site: Site | None = None
    blocked: Blocked | None = None


def find(program: Program, constant: Constant, now: Now) -> Iterator[Found]:
    """Every attention of `program` in order, and everything that resembles one with the reason why it is not."""
    for value in program.values:
        if value.name not in PRODUCTS:
            continue
        if value.name in ("baddbmm", "addmm") and arg(value, "beta") != 0:
            continue
        for found in (_Weights(program, value, side, constant, now).find() for side in (0, 1)):
            if found is not None:
                yield found
                break


@dataclass
class _Walk:
    """Where the walk from the second product up to the softmax stands, and what it has passed."""

    value: Value
    dims: Dims
    passed: list[Value] = field(default_factory=list)
    dropout: float = 0.0
    dropout_value: Value | None = None
    weight: Number = 1.0
    weights: list[Factor] = field(default_factory=list)
    zeroed: list[tuple[Value, bool]] = field(default_factory=list)
    sliced: Value | None = None  #: the slice that drops the sink's column


class _Weights:
    """One operand of one product, taken for the attention weights."""

    def __init__(self, program: Program, product: Value, side: int, constant: Constant, now: Now) -> None:
        self.program, self.product, self.constant, self.now = program, product, constant, now
        self.out_dims = fresh(product.shape)
        operands = product_operands(product)
        (self.inner,) = fresh(operands[0].shape[-1:])
        batch, (rows, columns) = self.out_dims[:-2], self.out_dims[-2:]
        left, right = (*batch, rows, self.inner), (*batch, self.inner, columns)
        self.rows = rows if side == 0 else columns
        self.walk = _Walk(operands[side], left if side == 0 else right)
        self.other = Operand(operands[1 - side], right if side == 0 else left)

    @property
    def keys(self) -> tuple[Axis, ...]:
        return atoms(self.inner)

    def find(self) -> Found | None:
        """The site, the reason why it is none, or None where there is no softmax behind this operand."""
        if not self.inner or not self._may_be_weights(self.walk.value):
            return None
        try:
            logits, dims, softmax = self._to_softmax()
            return Found(self.product, self._site(logits, dims, softmax))
        except _NoSoftmax:
            return None
        except Blocked as blocked:
            return Found(self.product, blocked=blocked)

    # ---- from the product up to the softmax -------------------------------------------------------------------

    def _to_softmax(self) -> tuple[Value, Dims, Value]:
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
                    name = value.name or "an operation that is not looked into"
                    raise Blocked(f"between the softmax and the product with v stands {name}", value)
                raise _NoSoftmax
            walk.passed.append(value)

    def _step(self, value: Value) -> bool:
        walk = self.walk
        step = above(value, walk.dims)
        if step is not None:
            if set(flat(step[1])) != set(flat(walk.dims)):
                return False
            walk.value, walk.dims = step
            return True
        source = value.args[0] if value.args and isinstance(value.args[0], Value) else None
        if source is None:
            return False
        if value.name == "_to_copy" and source.dtype in FLOATS and value.dtype in FLOATS:
            walk.value = source
            return True
        if value.name == "native_dropout" and value.index == 0 and walk.dropout_value is None:
            walk.value, walk.dropout, walk.dropout_value = source, float(value.args[1]), value
            return True
        if value.name == "masked_fill" and self._number(value.args[2]) == 0:
            walk.value = source
            walk.zeroed.append((value.args[1], True))
            return True
        if value.name == "slice" and walk.sliced is None:
            return self._drop_column(value, source)
        return value.name in ("mul", "div") and self._multiplied(value)

    def _number(self, item: Any) -> Any:
        return self.constant(item) if isinstance(item, Value) else item

    def _multiplied(self, value: Value) -> bool:
        """Weights times a number, or a tensor that is the same for all keys: it moves behind the product with v."""
        walk = self.walk
        number, source = scaled(value, self.constant)
        if number is not None and source is not None and source.dim == value.dim:
            walk.value, walk.weight = source, walk.weight * number
            return True
        if arg(value, "rounding_mode") if value.name == "div" else False:
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
                raise Blocked("weights are multiplied by a tensor over the keys after the softmax", value)
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
        found = _softmax_input(value)
        if found is None:
            return None
        logits, dim, inside = found
        dims = resolve(self.walk.dims)
        wanted = atoms(self.wide) if self.walk.sliced is not None else self.keys
        if dims[dim % value.dim] != wanted and set(dims[dim % value.dim]) != set(wanted):
            raise Blocked("the softmax runs over another dim than the one that is summed with v", value)
        self.walk.passed.extend(inside)
        return logits, dims, value

    def _site(self, logits: Value, dims: Dims, softmax: Value) -> Site:
        sink, read, walk = None, logits, self.walk
        if walk.sliced is not None:
            logits, dims, sink = self._sink(logits, dims)
        reader = Reader(self.inner, lambda: flat(dims), self.constant, self.now)
        scores = reader.read(logits, dims)
        if sink is not None and scores.shifted:
            raise Blocked("scores are shifted against the column that is appended to them", logits)
        value, factor = peel(self.other, self.constant, grad=self.product.grad)
        weight = walk.weight * factor
        site = Site(
            self.product, resolve(self.out_dims), self.out_dims[-2:], value, scores, self.keys, softmax, sink,
            walk.dropout, walk.dropout_value, weight, walk.weights, walk.zeroed, [*walk.passed, *scores.values],
        )  # fmt: skip
        return site if sink is not None else behind(site, read, dims, self.program)

    def _sink(self, logits: Value, dims: Dims) -> tuple[Value, Dims, Operand]:
        """Through `cat([scores, sink])`, with the casts and the shift by the maximum that come after it."""
        value = logits
        while value.name not in ("cat", "constant_pad_nd"):
            source = value.args[0] if value.args and isinstance(value.args[0], Value) else None
            cast = value.name == "_to_copy" and source is not None and exact_cast(source.dtype, value.dtype)
            shift = (
                value.name == "sub"
                and source is not None
                and shifts_rows(value.args[1], source, dims, atoms(self.wide))
            )
            if source is None or not (cast or shift):
                raise Blocked("a column is dropped after the softmax that was not appended before it", value)
            self.walk.passed.append(value)
            if shift:
                self.walk.passed.extend(row_maximum_values(value.args[1], source))
            value = source
        parts, dim = appended(value, front=self.front)
        if len(parts) != 2 or atoms(dims[dim]) != atoms(self.wide) or not equal(parts[1].shape[dim], 1):
            raise Blocked("a column is dropped after the softmax that was not appended before it", value)
        self.walk.passed.append(value)
        inner = list(dims)
        inner[dim] = self.inner
        sink = parts[1]
        sink_dims = tuple(() if is_one(size) else axes for axes, size in zip(dims, sink.shape, strict=True))
        step = above(sink, sink_dims)
        while step is not None:
            sink, sink_dims = step
            step = above(sink, sink_dims)
        return parts[0], tuple(inner), Operand(sink, resolve(sink_dims))

    # ---- looking ahead ----------------------------------------------------------------------------------------

    def _may_be_weights(self, value: Value) -> bool:
        return value.dtype in FLOATS and self._softmax_above(value)

    def _softmax_above(self, value: Value) -> bool:
        """Whether a softmax (in any spelling) is a few operations other than products up from `value`."""
        level, seen = [value], {value}
        for _ in range(_LOOK):
            following: list[Value] = []
            for item in level:
                if item.name in ("_softmax", "_log_softmax", "exp") or self._made_by_softmax(item):
                    return True
                for source in () if item.name in PRODUCTS else self._sources(item):
                    if source not in seen:
                        seen.add(source)
                        following.append(source)
            level = following
        return False

    def _made_by_softmax(self, value: Value) -> bool:
        """An opaque value that a softmax was written to (`softmax(s, -1, out=s)`)."""
        writers = self.program.writes.get(value.storage, ()) if value.leaf == "opaque" else ()
        return any("softmax" in str(node.target) for node in writers)

    def _sources(self, value: Value) -> list[Value]:
        """What a value is computed from; of an opaque one, what its node is given."""
        if value.leaf != "opaque" or value.node is None:
            return list(value.inputs())
        nodes = {value.node, *self.program.writes.get(value.storage, ())}
        given = (self.program.of_node.get(source) for node in nodes for source in node.all_input_nodes)
        return [v for v in given if isinstance(v, Value)]


class _NoSoftmax(Exception):
    """The operand has no softmax behind it."""


def _softmax_input(value: Value) -> tuple[Value, int, list[Value]] | None:
    """(input, dim, values inside) where `value` is the softmax of the input over one dim."""
    if value.name == "_softmax":
        return value.args[0], value.args[1], []
    if value.name == "exp" and value.args[0].name == "_log_softmax":
        return value.args[0].args[0], value.args[0].args[1], [value.args[0]]
    if value.name == "exp" and value.args[0].name == "sub":
        return _exp_minus_logsumexp(value.args[0])
    return _normalised(value) if value.name == "div" else None


def _exp_minus_logsumexp(shifted: Value) -> tuple[Value, int, list[Value]] | None:
    x, norm = shifted.args[0], shifted.args[1]
    if not isinstance(norm, Value) or norm.name != "logsumexp" or norm.args[0] is not x or shifted.args[2] != 1:
        return None
    over = list(norm.args[1])
    return (x, over[0], [shifted, norm]) if len(over) == 1 and norm.args[2] else None


def _normalised(value: Value) -> tuple[Value, int, list[Value]] | None:
    """`exp(x) / exp(x).sum(dim, keepdim=True)`: a softmax by hand, with or without its maximum taken off."""
    top, bottom = value.args[0], value.args[1]
    if arg(value, "rounding_mode") or not isinstance(top, Value) or not isinstance(bottom, Value):
        return None
    inside = [bottom]
    while bottom.name in ("expand", "alias"):
        bottom = bottom.args[0]
        inside.append(bottom)
    if top.name != "exp" or bottom.name != "sum" or bottom.args[0] is not top or not arg(bottom, "keepdim"):
        return None
    over = list(arg(bottom, "dim") or ())
    return (top.args[0], over[0], [top, *inside]) if len(over) == 1 else None
