"""Parts of weights: some heads of a softmax, or one of its rows, are the softmax of those heads or rows of q and k.

On the way up from the product with v an axis appears of which only a part is used further down; here that part is taken
of every operand, as nodes that the program has not. Of scores a part of the keys may be taken, too. Nothing here reads
scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from optpass.passes.attention.axes import Axis, atoms, resolve
from optpass.passes.attention.program.ir import Value
from optpass.passes.attention.site import Bias, Blocked, Factor, Operand, Scores


@dataclass(frozen=True)
class Pick:
    """The part of an axis that is used.

    Attributes:
        axis: the whole.
        start: place of the part.
        part: the axis of the part; None where it is one place.
    """

    axis: Axis
    start: int
    part: Axis | None


def picked(value: Value, dims: tuple[tuple[Axis, ...], ...]) -> tuple[Value, Any, Pick] | None:
    """What `value`, whose dims run over `dims`, is a part of, the axes of that, and the part; None if it is none."""
    if value.name in ("select", "slice"):
        source, dim, start = value.args[:3]
        at = dim % source.dim
        stop = value.args[4] == 1 if value.name == "slice" else True
        start = 0 if start is None else start
    elif value.name in ("split", "split_with_sizes", "chunk", "unbind"):
        source = value.args[0]
        at = (value.args[1] if value.name == "unbind" else value.args[2]) % source.dim
        stop = all(isinstance(size, int) for size in source.shape[at : at + 1])
        start = _offset(value, at)
    else:
        return None
    size = source.shape[at]
    if not stop or not isinstance(size, int) or not isinstance(start, int) or source.dtype != value.dtype:
        return None
    start = start + size if start < 0 else start
    axis = Axis(size)
    if value.dim < source.dim:
        return source, (*dims[:at], (axis,), *dims[at:]), Pick(axis, start, None)
    group = atoms(dims[at])
    if len(group) > 1 or not isinstance(value.shape[at], int):
        return None
    part = group[0] if group else None
    return source, (*dims[:at], (axis,), *dims[at + 1 :]), Pick(axis, start, part)


def _offset(value: Value, dim: int) -> Any:
    if value.name == "unbind":
        return value.index
    sizes = value.args[1]
    return sum(sizes[: value.index]) if isinstance(sizes, (list, tuple)) else sizes * value.index


def apply_picks(scores: Scores, picks: list[Pick]) -> None:
    """Takes the parts of every operand of `scores`."""
    for pick in picks:
        if pick.axis.parts and pick.part is not None:
            raise Blocked("a part of the weights is used that a reshape cuts across", scores.product)

        def take(operand: Operand, pick: Pick = pick) -> Operand:
            return take_part(operand, pick)

        scores.query, scores.key = take(scores.query), take(scores.key)
        scores.parts = [replace(p, query=take(p.query), key=take(p.key)) for p in scores.parts]
        scores.rows = _renamed(scores.rows, pick)
        scores.fills = [replace(f, mask=take(f.mask)) for f in scores.fills]
        scores.factors = [replace(f, operand=take(f.operand)) for f in scores.factors]
        scores.biases = [_bias(b, take) for b in scores.biases]
        scores.binary = tuple(map(take, scores.binary))


def _bias(bias: Bias, take: Any) -> Bias:
    factors = tuple(Factor(take(f.operand), f.inverse) for f in bias.factors)
    return replace(bias, operand=take(bias.operand), factors=factors)


def take_part(operand: Operand, pick: Pick) -> Operand:
    """The part of one operand; itself where it does not run over the axis."""
    for whole, start in _places(pick.axis, pick.start):
        part = pick.part if whole is pick.axis else None
        operand = _taken(operand, Pick(whole, start, part))
    return operand


def _places(axis: Axis, start: int) -> list[tuple[Axis, int]]:
    """An axis, or the parts that a reshape split it into, and the place in each."""
    if not axis.parts:
        return [(axis, start)]
    outer, inner = axis.parts
    if not isinstance(inner.size, int):
        raise Blocked("a part of the weights is used that a reshape of dynamic sizes cuts across")
    return [*_places(outer, start // inner.size), *_places(inner, start % inner.size)]


def _taken(operand: Operand, pick: Pick) -> Operand:
    value, dims = operand.value, resolve(operand.dims)
    at = next((d for d, group in enumerate(dims) if pick.axis in group), None)
    if at is None:
        return operand
    group = dims[at]
    if len(group) > 1:
        sizes = [a.size if isinstance(a.size, int) else -1 for a in group]
        if sizes.count(-1) > 1:
            raise Blocked("a part of the weights is used of which the sizes are dynamic", value)
        value = _made(torch.ops.aten.unflatten.int, value, (at, sizes))
        dims = (*dims[:at], *((a,) for a in group), *dims[at + 1 :])
        at += group.index(pick.axis)
    if pick.part is None:
        value = _made(torch.ops.aten.select.int, value, (at, pick.start))
        return Operand(value, (*dims[:at], *dims[at + 1 :]))
    stop = pick.start + pick.part.size
    value = _made(torch.ops.aten.slice.Tensor, value, (at, pick.start, stop, 1))
    return Operand(value, (*dims[:at], (pick.part,), *dims[at + 1 :]))


def _made(op: Any, source: Value, args: tuple[Any, ...]) -> Value:
    """The result of an operation that no node of the graph computes."""
    with torch.no_grad():
        tensor = op(source.tensor, *args)
    return Value(
        tensor, op=op, args=(source, *args), node=source.node, grad=source.grad, autocast=source.autocast,
        storage=source.storage, version=source.version,
    )  # fmt: skip


def _renamed(axes: tuple[Axis, ...], pick: Pick) -> tuple[Axis, ...]:
    return tuple(pick.part if a is pick.axis and pick.part is not None else a for a in axes)
