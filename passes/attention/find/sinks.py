"""Sinks: a logit that takes part in the softmax and has no value, as a column of the scores or written behind them.

Behind: softmax(s) v · sigmoid(logsumexp(s) - sink) is the same, for logsumexp(s) is the logarithm of what the softmax
divides by. Found here; what the call makes of a sink is `rewrite`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from optpass.passes.attention.axes import Dims, above, atoms, below, broadcast, equal, flat, is_one, resolve
from optpass.passes.attention.find.operands import FLOATS, exact_cast
from optpass.passes.attention.find.softmaxes import Softmax
from optpass.passes.attention.program.ir import Program, Value, arg
from optpass.passes.attention.site import Blocked, Operand, Site


def appended(value: Value, *, front: bool) -> tuple[tuple[Value, ...], int]:
    """(scores, column) that are next to each other in `value`, and the dim; `front`: the column comes first."""
    if value.name == "cat":
        parts = tuple(value.args[0])
        return (parts[::-1] if front else parts), value.args[1] % value.dim
    source, pad, number = value.args
    if list(pad) != ([1, 0] if front else [0, 1]) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return (), 0
    return (source, _filled(source, number, value)), value.dim - 1


def _filled(like: Value, number: float, user: Value) -> Value:
    """A number as a tensor with as many dims as `like`, each of one element."""
    shape = (1,) * like.dim
    return Value(
        like.tensor.new_empty(shape), op=torch.ops.aten.full.default, grad=like.grad, autocast=like.autocast,
        args=(shape, number, like.dtype, torch.strided, like.tensor.device, False), node=user.node,
    )  # fmt: skip


def of_sum(spelled: Softmax, like: Value, dims: Dims, keys: Sequence[object]) -> Operand:
    """The sink of a softmax by hand, whose sum is of more than exponentials of `like`, of which `dims` are the axes."""
    sink = spelled.sink
    if not isinstance(sink, Value):
        assert sink is not None
        number = math.log(sink) if spelled.sink_added else sink
        return Operand(_filled(like, number, like), ((),) * len(dims))
    if sink.dim > len(dims):
        raise Blocked("what is added to the sum of the exponentials has more dims than they", sink)
    operand = _unlaid(Operand(sink, broadcast(dims, sink.shape)))
    if set(flat(operand.dims)) & set(keys):
        raise Blocked("what is added to the sum of the exponentials depends on the keys", sink)
    if not spelled.sink_added:
        return operand
    if operand.value.name != "exp":
        raise Blocked("what is added to the sum of the exponentials is no exponential", sink)
    return Operand(operand.value.args[0], operand.dims)


# ---- behind the product -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gate:
    """`sigmoid(logsumexp(scores) - sink)`, and the values that make it."""

    sink: Operand
    values: tuple[Value, ...]


def behind(site: Site, logits: Value, dims: Dims, program: Program, *, weights_only: bool = False) -> Site:
    """`site` with the sink that multiplies its weights or its result; `site` itself where nothing like that does.

    Args:
        site: an attention without a sink.
        logits, dims: what its softmax reads, and the axes of that.
        program: that the site is in.
        weights_only: what multiplies the result is not the site's alone.

    Raises:
        Blocked: the scores are shifted against the sink.
    """
    reader = _GateReader(logits, dims, site.keys)
    for at, factor in enumerate(site.weights):
        gate = None if factor.inverse else reader.read(factor.operand)
        if gate is not None:
            found = replace(site, weights=[*site.weights[:at], *site.weights[at + 1 :]])
            return _with(found, gate)
    return site if weights_only else _scaled(site, reader, program)


def _scaled(site: Site, reader: _GateReader, program: Program) -> Site:
    """Down from the product, through layout, to a multiplication by the gate."""
    value, dims, passed = site.output, site.out_dims, [*site.values]
    while len(users := program.users(value)) == 1:
        (user,) = users
        passed.append(value)
        step = below(value, user, dims)
        if step is not None:
            value, dims = user, step
            continue
        if user.name != "mul" or user.dtype != value.dtype or user.dim != value.dim:
            break
        for own, other in ((user.args[0], user.args[1]), (user.args[1], user.args[0])):
            if own is not value or not isinstance(other, Value) or not _fits(other, value):
                continue
            gate = reader.read(Operand(other, broadcast(dims, other.shape)))
            if gate is not None:
                return _with(replace(site, output=user, out_dims=resolve(dims), values=passed), gate)
        break
    return site


def _fits(other: Value, value: Value) -> bool:
    """Whether multiplying by `other` leaves the shape of `value`."""
    sizes = zip(other.shape, value.shape[value.dim - other.dim :], strict=True)
    return other.dim <= value.dim and all(is_one(a) or equal(a, b) for a, b in sizes)


def _with(site: Site, gate: _Gate) -> Site:
    if site.scores.shifted:
        raise Blocked("scores are shifted against the sink behind them", site.output)
    values = [*site.values, *(v for v in gate.values if v not in site.values)]
    return replace(site, sink=gate.sink, sink_behind=True, values=values)


class _GateReader:
    """Reads factors of the weights of one softmax.

    Args:
        logits, dims: what the softmax reads, and the axes of that.
        keys: atoms of the axis that it normalises.
    """

    def __init__(self, logits: Value, dims: Dims, keys: Sequence[object]) -> None:
        self.logits = list(_casts(logits))
        self.dims, self.keys = resolve(dims), set(keys)

    def read(self, factor: Operand) -> _Gate | None:
        """The sink that `factor` stands for; None if it is anything else."""
        passed: list[Value] = []
        value, dims = self._up(factor.value, factor.dims, passed)
        if value.name != "sigmoid":
            return None
        passed.append(value)
        value, dims = self._up(value.args[0], dims, passed)
        if value.name == "sub" and arg(value, "alpha") in (None, 1) and isinstance(value.args[0], Value):
            left, right = value.args[0], value.args[1]
            right = right if isinstance(right, Value) else _filled(left, right, value)
            if left.dim != value.dim:
                return None
            passed.append(value)
            lse, lse_dims = self._up(left, broadcast(dims, left.shape), passed)
            sink = _unlaid(Operand(right, broadcast(dims, right.shape)))
        else:
            lse, lse_dims = value, dims
            sink = Operand(_filled(value, 0.0, value), ((),) * value.dim)
        if not self._sums(lse, lse_dims):
            return None
        inside = [v for v in _casts(lse.args[0]) if v not in self.logits]
        return _Gate(sink, (*passed, lse, *inside))

    def _up(self, value: Value, dims: Dims, passed: list[Value]) -> tuple[Value, Dims]:
        """Through layout and casts between floats."""
        while True:
            step = above(value, dims)
            source = value.args[0] if value.name == "_to_copy" else None
            if step is None and isinstance(source, Value) and {source.dtype, value.dtype} <= FLOATS.keys():
                step = source, dims
            if step is None:
                return value, dims
            passed.append(value)
            value, dims = step

    def _sums(self, lse: Value, dims: Dims) -> bool:
        """Whether `lse`, with these axes, is the logarithm of what the softmax divides by."""
        if lse.name != "logsumexp" or not any(v in self.logits for v in _casts(lse.args[0])):
            return False
        over = [d % len(self.dims) for d in lse.args[1]]
        kept = bool(arg(lse, "keepdim"))
        wanted = [() if d in over else atoms(axes) for d, axes in enumerate(self.dims) if kept or d not in over]
        summed = {axis for d in over for axis in flat((self.dims[d],))}
        have = [atoms(axes) for axes in resolve(dims)]
        return summed == self.keys and have == wanted


def _casts(value: Value) -> Iterator[Value]:
    """`value`, and what it was before casts that change no number."""
    yield value
    while (
        value.name == "_to_copy" and isinstance(value.args[0], Value) and exact_cast(value.args[0].dtype, value.dtype)
    ):
        value = value.args[0]
        yield value


def _unlaid(operand: Operand) -> Operand:
    """Before the layout operations that made its shape."""
    value, dims = operand.value, operand.dims
    step: tuple[Value, Dims] | None = (value, dims)
    while step is not None:
        value, dims = step
        step = above(value, dims)
    return Operand(value, resolve(dims))
