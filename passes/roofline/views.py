"""What each view op does to the map of a read. Pure functions of the op's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optpass.passes.roofline.index_map import IndexMap

Transform = Callable[[IndexMap, Sequence[Any], Sequence[int]], IndexMap]


def apply(name: str, source: IndexMap, args: Sequence[Any], out_shape: Sequence[int]) -> IndexMap:
    """The map of `name(source, *args)`, a view of shape `out_shape`.

    Views that are not known here, or whose arguments are not plain, are read as an opaque reshape.
    """
    transform = _TRANSFORMS.get(name)
    if transform is not None:
        try:
            result = transform(source, args, out_shape)
        except (IndexError, TypeError, ValueError):
            result = None
        if result is not None and tuple(result.shape) == tuple(out_shape):
            return result
    return source.reshaped(out_shape) if _count(source.shape) == _count(out_shape) else source.gathered(out_shape)


def part(name: str, source: IndexMap, args: Sequence[Any], index: int, shapes: Sequence[Sequence[int]]) -> IndexMap:
    """The map of result `index` of `split`, `chunk` or `unbind`."""
    position = 1 if name != "unbind" else 0
    dim = args[position] if len(args) > position and isinstance(args[position], int) else 0
    dim %= max(1, len(source.shape))
    if name == "unbind":
        return source.selected(dim, index)
    start = sum(shape[dim] for shape in shapes[:index])
    return source.sliced(dim, start, shapes[index][dim], 1)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _permute(m: IndexMap, args: Sequence[Any], _: Sequence[int]) -> IndexMap:
    return m.permuted([d % len(m.shape) for d in args[0]])


def _transpose(m: IndexMap, args: Sequence[Any], _: Sequence[int]) -> IndexMap:
    order = list(range(len(m.shape)))
    a, b = args[0] % len(order), args[1] % len(order)
    order[a], order[b] = order[b], order[a]
    return m.permuted(order)


def _t(m: IndexMap, args: Sequence[Any], _: Sequence[int]) -> IndexMap:
    return m.permuted(list(reversed(range(len(m.shape)))))


def _expand(m: IndexMap, _: Sequence[Any], out: Sequence[int]) -> IndexMap:
    return m.broadcast(out)


def _unsqueeze(m: IndexMap, args: Sequence[Any], _: Sequence[int]) -> IndexMap:
    dim = args[0] % (len(m.shape) + 1)
    shape = (*m.shape[:dim], 1, *m.shape[dim:])
    return IndexMap(shape, (*m.strides[:dim], 0, *m.strides[dim:]), m.offset, m.opaque)


def _slice(m: IndexMap, args: Sequence[Any], out: Sequence[int]) -> IndexMap:
    dim = (args[0] if args else 0) % len(m.shape)
    start = args[1] if len(args) > 1 and args[1] is not None else 0
    step = args[3] if len(args) > 3 else 1
    start = min(max(start + m.shape[dim] if start < 0 else start, 0), m.shape[dim])
    return m.sliced(dim, start, out[dim], step)


def _select(m: IndexMap, args: Sequence[Any], _: Sequence[int]) -> IndexMap:
    dim = args[0] % len(m.shape)
    return m.selected(dim, args[1] % m.shape[dim])


def _same(m: IndexMap, _: Sequence[Any], __: Sequence[int]) -> IndexMap:
    return m


_TRANSFORMS: dict[str, Transform] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    "select": _select,
    "alias": _same,
    "detach": _same,
    "view_of": _same,
}
