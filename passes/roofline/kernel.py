"""The units of the fusion model: a read, a value that no kernel has stored yet, and a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from optpass.passes.roofline.index_map import IndexMap, merge_dims
from optpass.passes.roofline.loops import pick_order
from optpass.passes.roofline.lowering import Role


@dataclass(frozen=True, slots=True)
class Read:
    """A read of buffer `buffer` through `map`; `itemsize` bytes an element."""

    buffer: int
    map: IndexMap
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes touched."""
        return self.map.elements() * self.itemsize


#: A view as a function of the map that it is applied to.
View = Callable[[IndexMap], IndexMap]


@dataclass(slots=True, eq=False)
class Storage:
    """What an op computed: an expression that whoever uses it computes again, or a stored buffer.

    Attributes:
        shape: of the result.
        itemsize: bytes of an element.
        reads: buffers that the expression reads, through maps over `shape`.
        ops: indices of the ops in the expression; empty once it is stored.
        heavy: contains an op that the CPU backend stores when it is reused.
        buffer: number of the buffer; None while nothing is stored.
        strides: of the buffer.
    """

    shape: tuple[int, ...]
    itemsize: int
    reads: tuple[Read, ...] = ()
    ops: tuple[int, ...] = ()
    heavy: bool = False
    buffer: int | None = None
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A storage seen through views."""

    storage: Storage
    views: tuple[View, ...] = ()

    def through(self, view: View) -> Value:
        """This value seen through one more view."""
        return Value(self.storage, (*self.views, view))

    def reads(self) -> list[Read]:
        """What reading this value reads, through maps over the value's own shape."""
        storage = self.storage
        if storage.buffer is not None:
            return [Read(storage.buffer, self._seen(IndexMap(storage.shape, storage.strides)), storage.itemsize)]
        return [Read(r.buffer, self._seen(r.map), r.itemsize) for r in storage.reads]

    def _seen(self, map: IndexMap) -> IndexMap:
        for view in self.views:
            map = view(map)
        return map


@dataclass(slots=True)
class Kernel:
    """A kernel, before or after merging.

    Attributes:
        ops: indices of its ops.
        reads: by (buffer, key of the map), bytes touched.
        writes: by buffer, (key of the map, bytes).
        outer, inner: sizes of its loops outside and inside the reduction, neighbours merged where they run on.
        shape: the logical shape it iterates over.
        merged: kernels in it; `stacked`: merged by sharing outer loops only.
        strided: bytes read whose innermost step is not 1, part of the reads.
    """

    ops: list[int]
    reads: dict[tuple[int, tuple[object, ...]], int]
    writes: dict[int, tuple[tuple[object, ...], int]]
    role: Role
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    shape: tuple[int, ...]
    merged: int = 1
    stacked: int = 0
    strided: int = 0
    first: int = 0
    last: int = 0
    predecessors: set[int] = field(default_factory=set)
    successors: set[int] = field(default_factory=set)

    @property
    def outer_count(self) -> int:
        """Iterations outside the reduction."""
        return _product(self.outer)

    @property
    def inner_count(self) -> int:
        """Iterations of the reduction, 1 if there is none."""
        return _product(self.inner)


def loop_kernel(
    ops: Iterable[int], reads: Iterable[Read], shape: tuple[int, ...], reduced: frozenset[int], write: tuple[int, ...]
) -> Kernel:
    """A kernel that loops over `shape`, reducing the dimensions in `reduced`.

    Args:
        ops: indices of the ops in it.
        reads: through maps over `shape`.
        shape: what it iterates over.
        reduced: dimensions that are reduced; empty for a pointwise kernel.
        write: strides of what it writes, over the kept dimensions in order.
    """
    reads = list(reads)
    kept = [d for d in range(len(shape)) if d not in reduced]
    gone = [d for d in range(len(shape)) if d in reduced]
    written = dict(zip(kept, write, strict=True))
    strides = [r.map.strides for r in reads]
    out = tuple(written.get(d, 0) for d in range(len(shape)))
    outer_order = _ordered(kept, [*strides, out], shape)
    inner_order = _ordered(gone, strides, shape)
    every = [*strides, out]
    outer, _ = merge_dims([shape[d] for d in outer_order], [[s[d] for d in outer_order] for s in every])
    inner, _ = merge_dims([shape[d] for d in inner_order], [[s[d] for d in inner_order] for s in every])
    order = [*outer_order, *inner_order]
    found: dict[tuple[int, tuple[object, ...]], int] = {}
    strided = 0
    for read in reads:
        key = (read.buffer, read.map.permuted(order).key())
        if key not in found and order and read.map.strides[order[-1]] not in (0, 1):
            strided += read.bytes
        found[key] = max(found.get(key, 0), read.bytes)
    role = Role.REDUCTION if reduced else Role.POINTWISE
    return Kernel([*dict.fromkeys(ops)], found, {}, role, outer, inner, shape, strided=strided)


def write_key(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[object, ...]:
    """Key of a write, comparable with the keys of reads: in the order of the loops, which follow the strides."""
    order = _ordered(list(range(len(shape))), [strides], shape)
    return IndexMap(shape, strides).permuted(order).key()


def _ordered(dims: list[int], strides: list[tuple[int, ...]], shape: tuple[int, ...]) -> list[int]:
    order = pick_order([[s[d] for d in dims] for s in strides], [shape[d] for d in dims])
    return [dims[i] for i in order]


def _product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
