"""Keys in pieces: one softmax over the scores of several products side by side, or whose weights meet v piece by piece.

`softmax(cat([q k1ᵀ, q k2ᵀ]))` is that of q and `cat([k1, k2])`, and `w[..., :n] v1 + w[..., n:] v2` is w times
`cat([v1, v2])`. Keys and values are joined here, as nodes that the program has not; nothing here reads scores.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from optpass.passes.attention.axes import Axis, Dims, above, atoms, flat, fresh, resolve, same_sizes
from optpass.passes.attention.find.operands import FLOATS, product_operands
from optpass.passes.attention.find.picks import Pick, picked
from optpass.passes.attention.program.ir import Program, Value, arg, same
from optpass.passes.attention.site import Blocked, Operand, Scores

#: Terms of a sum up to which it is looked at.
_MOST = 8


@dataclass(frozen=True)
class Summed:
    """`total = weights[..., :n] v1 + weights[..., n:] v2 + ...`, in any order, of all keys that the weights have.

    Attributes:
        total, dims: the sum, and its axes.
        sides: axes of its rows and of its columns, in all products.
        weights, values: the weights and the joined values, both with the axis `keys`.
        products: what is added up.
        passed: values between the weights and the sum.
    """

    total: Value
    dims: Dims
    sides: Dims
    weights: Operand
    values: Operand
    keys: Axis
    products: tuple[Value, ...]
    passed: tuple[Value, ...]


@dataclass(frozen=True)
class _Term:
    """One product: its rows and columns, the values that it weighs, the whole of its weights, and which part it has."""

    product: Value
    sides: tuple[tuple[Axis, ...], tuple[Axis, ...]]
    values: Operand
    whole: Operand
    pick: Pick
    passed: tuple[Value, ...]


def sums(program: Program, behind: Container[Value]) -> Iterator[Summed]:
    """Every sum of products that is one product; `behind`: values that a softmax of scores is behind."""
    for value in program.values:
        found = _sum(value, behind) if value.name == "add" else None
        if found is not None:
            yield found


def _sum(total: Value, behind: Container[Value]) -> Summed | None:
    leaves = _addends(total)
    if leaves is None:
        return None
    dims = fresh(total.shape)
    terms: list[_Term] = []
    for leaf in leaves[0]:
        term = _term(leaf, dims, behind)
        if term is None or term.values.value.dtype != total.dtype:
            return None
        terms.append(term)
    terms.sort(key=lambda term: term.pick.start)
    keys, start = terms[0].pick.axis, 0
    for term in terms:
        if term.whole.value is not terms[0].whole.value or term.pick.start != start or term.pick.part is None:
            return None
        start += term.pick.part.size
    wholes = {resolve(_renamed(term.whole.dims, term.pick.axis, keys)) for term in terms}
    if start != keys.size or len(wholes) != 1 or any(atoms((t.pick.axis,)) != (t.pick.axis,) for t in terms):
        return None
    pieces = [(term.values, term.pick.part) for term in terms if term.pick.part is not None]
    try:
        weights = Operand(terms[0].whole.value, next(iter(wholes)))
        values = together(pieces, keys, keys.size, flat(weights.dims), total)
    except Blocked:
        return None
    sides = tuple(
        tuple(a for a in atoms(terms[0].sides[i]) if all(a in atoms(term.sides[i]) for term in terms)) for i in (0, 1)
    )
    passed = tuple(dict.fromkeys((*leaves[1], *(v for term in terms for v in term.passed))))
    return Summed(total, dims, sides, weights, values, keys, tuple(term.product for term in terms), passed)


def _addends(total: Value) -> tuple[list[Value], list[Value]] | None:
    """What is added up, two values or more of the sum's own shape, and the sums in between."""
    leaves, between, todo = [], [], [total]
    while todo:
        value = todo.pop()
        if value.name != "add":
            leaves.append(value)
        elif arg(value, "alpha") not in (None, 1) or not all(isinstance(a, Value) for a in value.args[:2]):
            return None
        else:
            between.append(value)
            todo += value.args[:2]
        if value.dtype != total.dtype or not same_sizes(value.shape, total.shape) or len(leaves) + len(todo) > _MOST:
            return None
    return leaves, between[1:]


def _term(value: Value, dims: Dims, behind: Container[Value]) -> _Term | None:
    """A product of a part of some weights with v, in any layout."""
    passed: list[Value] = []
    product, dims = _up(value, dims, passed)
    if product.name not in ("bmm", "mm"):
        return None
    passed.append(product)
    (inner,) = fresh(product_operands(product)[0].shape[-1:])
    batch, rows, columns = dims[:-2], dims[-2], dims[-1]
    sides = zip(product_operands(product), ((*batch, rows, inner), (*batch, inner, columns)), strict=True)
    left, right = (Operand(*side) for side in sides)
    for weights, values, ends in ((left, right, (rows, columns)), (right, left, (columns, rows))):
        if weights.value not in behind or len(inner) != 1:
            continue
        between = [*passed]
        source, source_dims = _up(weights.value, weights.dims, between)
        while source.name == "_to_copy" and source.dtype in FLOATS and source.args[0].dtype in FLOATS:
            between.append(source)
            source, source_dims = _up(source.args[0], source_dims, between)
        found = picked(source, source_dims)
        if found is not None and found[2].part is inner[0]:
            whole = Operand(found[0], found[1])
            return _Term(product, ends, _stripped(values), whole, found[2], (*between, source))
    return None


def _stripped(operand: Operand) -> Operand:
    """An operand without its layout: heads that it was repeated for are repeated by the kernel."""
    value, dims = operand.value, operand.dims
    while (step := above(value, dims)) is not None and step[0].grad == value.grad:
        value, dims = step
    return Operand(value, dims)


def _up(value: Value, dims: Dims, passed: list[Value]) -> tuple[Value, Dims]:
    """Up through layout, no axis of which may get lost."""
    while (step := above(value, dims)) is not None and set(flat(step[1])) == set(flat(dims)):
        passed.append(value)
        value, dims = step
    return value, dims


def _renamed(dims: Dims, axis: Axis, other: Axis) -> Dims:
    return tuple(tuple(other if a is axis else a for a in group) for group in dims)


# ---- scores side by side --------------------------------------------------------------------------------------------


def beside(parts: Sequence[tuple[Scores, Axis]], keys: Axis, value: Value, dims: Dims) -> Scores:
    """Scores of one query over several keys, each with its own axis, as those over all of them.

    Args:
        parts: scores, and the axis of their keys.
        keys: axis of all keys.
        value, dims: the scores side by side, and their axes.

    Raises:
        Blocked: they are not of the same queries, or more than products times one number.
    """
    first = parts[0][0]
    operands = []
    for scores, own in parts:
        alike = scores.scale == first.scale and scores.steps == first.steps and scores.dtypes == first.dtypes
        if not _plain(scores) or not alike:
            raise Blocked("scores of several products are put side by side that are not scaled or masked alike", value)
        names = _same_query(first.query, scores.query, first.contraction, scores.contraction)
        if names is None:
            raise Blocked("scores of different queries are put side by side", value)
        key_dims = resolve(scores.key.dims)
        for axis, name in names.items():
            key_dims = _renamed(key_dims, axis, name)
        operands.append((Operand(scores.key.value, key_dims), own))
    rows = tuple(a for a in atoms(first.rows) if all(a in atoms(scores.rows) for scores, _ in parts))
    if not rows:
        raise Blocked("scores of different queries are put side by side", value)
    size = value.shape[next(d for d, group in enumerate(dims) if keys in group)]
    key = together(operands, keys, size, flat(dims), value)
    values = list(dict.fromkeys(v for scores, _ in parts for v in scores.values))
    unread = [v for scores, _ in parts for v in scores.unread]
    return replace(first, key=key, rows=rows, values=values, unread=unread, joined=True)


def _plain(scores: Scores) -> bool:
    """Nothing but a product times a number so far."""
    changed = scores.parts or scores.factors or scores.fills or scores.biases or scores.softcaps or scores.binary
    moved = scores.shifted or scores.topped or scores.centred or scores.offset or scores.shifts or scores.held
    return not changed and not moved and scores.floor is None and isinstance(scores.scale, (int, float))


def _same_query(
    one: Operand, other: Operand, summed: tuple[Axis, ...], others: tuple[Axis, ...]
) -> dict[Axis, Axis] | None:
    """Which axis of the first product's sum an axis of the other's is, if both have the same queries; else None."""
    ours, theirs = resolve(one.dims), resolve(other.dims)
    if not same(one.value, other.value) or list(map(len, ours)) != list(map(len, theirs)):
        return None
    names: dict[Axis, Axis] = {}
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        if b in atoms(others) and a in atoms(summed):
            names[b] = a
        elif a is not b:
            return None
    return names


# ---- joining --------------------------------------------------------------------------------------------------------


def together(
    pieces: Sequence[tuple[Operand, Axis]], keys: Axis, size: Any, order: Sequence[Axis], like: Value
) -> Operand:
    """Operands one behind the other along `keys`, each of which has an axis of its own in place of it.

    Args:
        pieces: the operands and these axes.
        keys, size: the axis, and its size as a shape has it.
        order: of the axes that come before the keys; those that are not named there come after them.
        like: under the modes of which it is made.

    Raises:
        Blocked: dtypes differ, or the size of an axis is not at hand.
    """
    dtype = pieces[0][0].value.dtype
    if any(piece.value.dtype != dtype for piece, _ in pieces):
        raise Blocked("keys or values of different dtypes are put side by side", like)
    groups = [resolve(piece.dims) for piece, _ in pieces]
    own = [atom for _, axis in pieces for atom in atoms((axis,))]
    found = list(dict.fromkeys(a for dims in groups for a in flat(dims) if a not in own))
    front = [a for a in order if a in found]
    back = [a for a in found if a not in front]
    sizes: dict[Axis, Any] = {}
    for piece, _ in pieces:
        sizes |= {g[0]: s for g, s in zip(resolve(piece.dims), piece.value.shape, strict=True) if len(g) == 1}
    shape = [_size(a, sizes) for a in front], [_size(a, sizes) for a in back]
    laid = []
    for piece, axis in pieces:
        parts = atoms((axis,))
        value = _laid(piece, [*front, *parts, *back], sizes, like)
        if len(parts) != 1:  # it runs over more than one dim of what the keys are made of
            whole_shape = [*shape[0], math.prod(_size(a, sizes) for a in parts), *shape[1]]
            value = _made(like, torch.ops.aten.reshape.default, whole_shape, dtype, value, whole_shape)
        laid.append(value)
    whole = _made(like, torch.ops.aten.cat.default, (*shape[0], size, *shape[1]), dtype, laid, len(front))
    return Operand(whole, tuple((a,) for a in (*front, keys, *back)))


def _laid(piece: Operand, order: Sequence[Axis], sizes: Mapping[Axis, Any], like: Value) -> Value:
    """An operand with one dim for each axis of `order`; what it lacks is expanded."""
    value, dims = piece.value, resolve(piece.dims)
    have = flat(dims)
    if [len(group) for group in dims] != [1] * len(have):
        shape = [_size(a, sizes) for a in have]
        value = _made(like, torch.ops.aten.reshape.default, shape, value.dtype, value, shape)
    kept = [a for a in order if a in have]
    if kept != list(have):
        at = [have.index(a) for a in kept]
        value = _made(like, torch.ops.aten.permute.default, [value.shape[d] for d in at], value.dtype, value, at)
    if len(kept) != len(order):
        narrow = [_size(a, sizes) if a in have else 1 for a in order]
        value = _made(like, torch.ops.aten.reshape.default, narrow, value.dtype, value, narrow)
        wide = [_size(a, sizes) for a in order]
        value = _made(like, torch.ops.aten.expand.default, wide, value.dtype, value, wide)
    return value


def _size(axis: Axis, sizes: Mapping[Axis, Any]) -> Any:
    if not isinstance(axis.size, int) and axis not in sizes:
        raise Blocked("keys or values are put side by side of which the sizes are dynamic")
    return axis.size if isinstance(axis.size, int) else sizes[axis]


def _made(like: Value, op: Any, shape: Sequence[Any], dtype: torch.dtype, source: Any, last: Any) -> Value:
    """The result of an operation that no node of the graph computes."""
    tensor = like.tensor.new_empty(tuple(shape), dtype=dtype)
    args = (source, last, False) if op is torch.ops.aten.expand.default else (source, last)
    return Value(
        tensor, op=op, args=args, node=like.node, grad=like.grad, autocast=like.autocast,
        storage=int(tensor.untyped_storage()._cdata),
    )  # fmt: skip
