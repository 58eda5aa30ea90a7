"""Elements of views and of copies that read their source at other indices; joins and indexing are in `rules_index`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from optpass.passes.attention.masks.elements import Elements, Index, UnknownError
from optpass.passes.attention.masks.integers import Int
from optpass.passes.attention.masks.pieces import Expr
from optpass.passes.attention.program.ir import Value

Rule: TypeAlias = Callable[[Elements, Value, Index], Expr | None]


def _moved(place: Callable[[Elements, Value, Index], Index]) -> Rule:
    """A rule for an operation that reads its first argument at other indices."""

    def rule(engine: Elements, value: Value, index: Index) -> Expr:
        return engine.element(value.args[0], place(engine, value, index))

    return rule


def size_of(engine: Elements, value: Value, dim: int) -> Int:
    """A size as a form."""
    return engine.sizes.form(value.shape[dim])


# ---- dims moved, added, dropped -------------------------------------------------------------------------------------


def _unsqueeze(engine: Elements, value: Value, index: Index) -> Index:
    dim = value.args[1] % value.dim
    return index[:dim] + index[dim + 1 :]


def _squeeze(engine: Elements, value: Value, index: Index) -> Index:
    source: Value = value.args[0]
    asked = value.args[1] if len(value.args) > 1 else range(source.dim)
    dims = {d % max(source.dim, 1) for d in (asked if isinstance(asked, (list, tuple, range)) else (asked,))}
    gone = {d for d in dims if isinstance(source.shape[d], int) and source.shape[d] == 1} if source.dim else set()
    if source.dim - len(gone) != value.dim:
        raise UnknownError
    rest = iter(index)
    return tuple(0 if d in gone else next(rest) for d in range(source.dim))


def _permute(engine: Elements, value: Value, index: Index) -> Index:
    place: list[Int] = [0] * value.dim
    for d, source in enumerate(value.args[1]):
        place[source % value.dim] = index[d]
    return tuple(place)


def _transpose(engine: Elements, value: Value, index: Index) -> Index:
    one, other = (value.args[1], value.args[2]) if len(value.args) > 2 else (-1, -2)
    place = list(index)
    if value.dim > 1:
        place[one], place[other] = place[other], place[one]
    return tuple(place)


def _expand(engine: Elements, value: Value, index: Index) -> Index:
    return engine.broadcast(value.args[0], value.shape, index)


def _repeat(engine: Elements, value: Value, index: Index) -> Index:
    source: Value = value.args[0]
    skipped = value.dim - source.dim
    return tuple(
        engine.atoms.call("mod", index[d + skipped], size_of(engine, source, d))
        if size_of(engine, source, d) != size_of(engine, value, d + skipped)
        else index[d + skipped]
        for d in range(source.dim)
    )


def _view(engine: Elements, value: Value, index: Index) -> Index:
    """Groups of dims with equal products are read as one running index each."""
    source: Value = value.args[0]
    old = [size_of(engine, source, d) for d in range(source.dim)]
    new = [size_of(engine, value, d) for d in range(value.dim)]
    place: list[Int] = []
    for olds, news in _groups(engine, old, new):
        sizes = [new[d] for d in news]
        if len(olds) == 1 and [s for s in sizes if s != 1] == [old[olds[0]]]:
            place.append(next(index[d] for d in news if new[d] != 1))
            continue
        flat: Int = 0
        for d in news:
            flat = engine.atoms.call("mul", flat, new[d]) + index[d]
        place.extend(_unravel(engine, flat, [old[d] for d in olds]))
    return tuple(place)


def _groups(engine: Elements, old: list[Int], new: list[Int]) -> list[tuple[list[int], list[int]]]:
    """Runs of old and new dims that cover the same elements, as short as possible."""
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        olds, news = list(range(i, min(i + 1, len(old)))), list(range(j, min(j + 1, len(new))))
        if olds and old[i] == 1 and not (news and new[j] == 1):
            news = []
        elif news and new[j] == 1 and not (olds and old[i] == 1):
            olds = []
        else:
            while not engine.sizes.equal(*(_product(engine, sizes) for sizes in _sizes(old, olds, new, news))):
                one, other = (_product(engine, sizes) for sizes in _sizes(old, olds, new, news))
                if i + len(olds) < len(old) and (_smaller(one, other) or j + len(news) >= len(new)):
                    olds.append(i + len(olds))
                elif j + len(news) < len(new):
                    news.append(j + len(news))
                else:
                    raise UnknownError
        i, j = i + len(olds), j + len(news)
        found.append((olds, news))
    return found


def _sizes(old: list[Int], olds: list[int], new: list[Int], news: list[int]) -> tuple[list[Int], list[Int]]:
    return [old[d] for d in olds], [new[d] for d in news]


def _product(engine: Elements, sizes: list[Int]) -> Int:
    total: Int = 1
    for size in sizes:
        total = engine.atoms.call("mul", total, size)
    return total


def _smaller(one: Int, other: Int) -> bool:
    """Which side of a group to let grow: numbers by size, a symbol counts as one more factor."""
    if isinstance(one, int) and isinstance(other, int):
        return one < other
    return isinstance(one, int)


def _unravel(engine: Elements, flat: Int, sizes: list[Int]) -> list[Int]:
    place: list[Int] = []
    for position, size in reversed(list(enumerate(sizes))):
        last = position == 0  # what is left is within the size already
        place.append(flat if last else engine.atoms.call("mod", flat, size) if size != 1 else 0)
        flat = flat if last or size == 1 else engine.atoms.call("floordiv", flat, size)
    return place[::-1]


# ---- parts ----------------------------------------------------------------------------------------------------------


def _slice(engine: Elements, value: Value, index: Index) -> Index:
    source, dim = value.args[0], value.args[1] % value.dim
    step = value.args[4] if len(value.args) > 4 else 1
    if not isinstance(step, int):
        raise UnknownError
    start = _start(engine, value.args[2], size_of(engine, source, dim))
    return (*index[:dim], start + index[dim] * step, *index[dim + 1 :])


def _start(engine: Elements, start: Any, size: Int) -> Int:
    """A start or a position counted from the front; beyond the end nothing is read, so that needs no clamp."""
    found = engine.sizes.form(0 if start is None else start)
    if engine.sizes.nonneg(found):
        return found
    if engine.sizes.nonneg(-found - 1) and engine.sizes.nonneg(found + size):
        return found + size
    raise UnknownError


def _select(engine: Elements, value: Value, index: Index) -> Index:
    source: Value = value.args[0]
    dim = value.args[1] % source.dim
    return (*index[:dim], _start(engine, value.args[2], size_of(engine, source, dim)), *index[dim:])


def _unbind(engine: Elements, value: Value, index: Index) -> Index:
    dim = value.args[1] % value.args[0].dim
    return (*index[:dim], value.index, *index[dim:])


def _split(engine: Elements, value: Value, index: Index) -> Index:
    dim, sizes = value.args[2] % value.dim, value.args[1]
    each = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * value.index
    start: Int = 0
    for size in each[: value.index]:
        start = start + engine.sizes.form(size)
    return (*index[:dim], index[dim] + start, *index[dim + 1 :])


def _flip(engine: Elements, value: Value, index: Index) -> Index:
    dims = {d % max(value.dim, 1) for d in value.args[1]}
    return tuple(size_of(engine, value, d) - 1 - i if d in dims else i for d, i in enumerate(index))


RULES: dict[str, Rule] = {
    "unsqueeze": _moved(_unsqueeze),
    "squeeze": _moved(_squeeze),
    "permute": _moved(_permute),
    **dict.fromkeys(("transpose", "t", "swapaxes", "swapdims"), _moved(_transpose)),
    "expand": _moved(_expand),
    "repeat": _moved(_repeat),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _moved(_view)),
    "slice": _moved(_slice),
    "select": _moved(_select),
    "unbind": _moved(_unbind),
    **dict.fromkeys(("split", "split_with_sizes"), _moved(_split)),
    "flip": _moved(_flip),
}
