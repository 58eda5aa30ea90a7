"""Elements of what joins tensors or picks from them by index: concatenations, pads, indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from optpass.passes.attention.masks.elements import Elements, Index, UnknownError
from optpass.passes.attention.masks.integers import Int, Lin
from optpass.passes.attention.masks.pieces import Expr, lift, where
from optpass.passes.attention.masks.predicates import all_of, eq, ge
from optpass.passes.attention.masks.rules_make import typed
from optpass.passes.attention.masks.rules_view import size_of
from optpass.passes.attention.program.ir import Value

Rule: TypeAlias = Callable[[Elements, Value, Index], Expr | None]

# ---- joins ----------------------------------------------------------------------------------------------------------


def _cat(engine: Elements, value: Value, index: Index) -> Expr:
    tensors, dim = value.args[0], value.args[1] % value.dim
    found: Expr | None = None
    ends: list[tuple[Int, Int]] = []
    start: Int = 0
    kept = [t for t in tensors if t.dim == value.dim]
    for tensor in kept:
        ends.append((start, start + size_of(engine, tensor, dim)))
        start = ends[-1][1]
    for tensor, (begin, end) in reversed(list(zip(kept, ends, strict=True))):
        inside = engine.element(tensor, (*index[:dim], index[dim] - begin, *index[dim + 1 :]))
        inside = engine.cast(inside, tensor.dtype, value.dtype)
        found = inside if found is None else where(ge(end - 1 - index[dim]), inside, found)
    return _known(found)


def _stack(engine: Elements, value: Value, index: Index) -> Expr:
    tensors, dim = value.args[0], value.args[1] % value.dim
    found: Expr | None = None
    for position, tensor in reversed(list(enumerate(tensors))):
        inside = engine.cast(engine.element(tensor, index[:dim] + index[dim + 1 :]), tensor.dtype, value.dtype)
        found = inside if found is None else where(eq(index[dim] - position), inside, found)
    return _known(found)


def _known(found: Expr | None) -> Expr:
    if found is None:
        raise UnknownError
    return found


def _pad(engine: Elements, value: Value, index: Index) -> Expr:
    source, pads = value.args[0], value.args[1]
    place, inside = list(index), []
    for pair in range(len(pads) // 2):
        dim = value.dim - 1 - pair
        before = engine.sizes.form(pads[2 * pair])
        place[dim] = index[dim] - before
        inside += [ge(place[dim]), ge(size_of(engine, source, dim) - 1 - place[dim])]
    fill = typed(engine, value.args[2], value.dtype)
    return where(all_of(inside), engine.element(source, tuple(place)), fill)


# ---- indexing -------------------------------------------------------------------------------------------------------


def _index(engine: Elements, value: Value, index: Index) -> Expr:
    source, given = value.args[0], value.args[1]
    given = [*given, *[None] * (source.dim - len(given))]
    places = [d for d, item in enumerate(given) if item is not None]
    if not places or any(given[d].dtype not in (torch.int64, torch.int32) for d in places):
        raise UnknownError
    rank = max(given[d].dim for d in places)
    adjacent = places == list(range(places[0], places[-1] + 1))
    first = places[0] if adjacent else 0
    shape = value.shape[first : first + rank]
    inner = index[first : first + rank]
    rest = iter(index[:first] + index[first + rank :])
    items: list[Expr] = []
    for item in given:
        if item is None:
            items.append(next(rest))
        else:
            items.append(engine.element(item, engine.broadcast(item, shape, inner)))
    return lift(lambda *place: _at(engine, source, place), items)


def _index_select(engine: Elements, value: Value, index: Index) -> Expr:
    source, chosen = value.args[0], value.args[2]
    dim = value.args[1] % max(value.dim, 1)
    item = engine.element(chosen, (index[dim],) if chosen.dim else ())
    return lift(lambda *place: _at(engine, source, place), [*index[:dim], item, *index[dim + 1 :]])


def _gather(engine: Elements, value: Value, index: Index) -> Expr:
    source, chosen = value.args[0], value.args[2]
    dim = value.args[1] % max(value.dim, 1)
    item = engine.element(chosen, index)
    return lift(lambda *place: _at(engine, source, place), [*index[:dim], item, *index[dim + 1 :]])


def _at(engine: Elements, source: Value, place: tuple[Expr, ...]) -> Expr:
    """source[place] where a place below 0 counts from the end, as in Python."""
    found: list[Int] = []
    for d, item in enumerate(place):
        assert isinstance(item, (int, Lin))
        if isinstance(item, int) and item < 0:
            item = item + size_of(engine, source, d)
        found.append(item)
    if all(engine.sizes.nonneg(item) for item in found):
        return engine.element(source, tuple(found))
    return engine.unknown(source, tuple(found))  # a function of the places, whatever they are


RULES: dict[str, Rule] = {
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
}
