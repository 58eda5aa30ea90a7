"""How a loop nest reads a buffer: an affine map from the indices of a value to positions in the buffer.

Views only change this map. Where a view cannot be written as strides (a reshape across a transpose), the map becomes
opaque: a unique key that equals nothing but itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Source of keys for maps that are not affine.
_KEYS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class IndexMap:
    """`offset + sum(index[d] * strides[d])`, in elements, over a value of `shape`.

    Attributes:
        shape: of the value that is read, not of the buffer.
        strides: 0 where a dimension is broadcast.
        opaque: 0 for an affine map; else a key that stands for a computed position in addition to the strides.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    opaque: int = 0

    def elements(self) -> int:
        """Distinct elements touched, broadcast dimensions counted once."""
        count = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            count *= size if stride or self.opaque else 1
        return count

    def permuted(self, order: Sequence[int]) -> IndexMap:
        """Dimension `d` of the result is dimension `order[d]` of this."""
        return IndexMap(
            tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.offset, self.opaque
        )

    def broadcast(self, shape: Sequence[int]) -> IndexMap:
        """Expanded to `shape`, new dimensions in front."""
        missing = len(shape) - len(self.shape)
        strides = [0] * missing
        for size, stride, wanted in zip(self.shape, self.strides, shape[missing:], strict=True):
            strides.append(stride if size == wanted else 0)
        return IndexMap(tuple(shape), tuple(strides), self.offset, self.opaque)

    def sliced(self, dim: int, start: int, size: int, step: int) -> IndexMap:
        """`size` elements of `dim` from `start`, `step` apart."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[dim]
        shape[dim], strides[dim] = size, strides[dim] * step
        return IndexMap(tuple(shape), tuple(strides), offset, self.opaque)

    def selected(self, dim: int, index: int) -> IndexMap:
        """Element `index` of `dim`; the dimension goes."""
        offset = self.offset + index * self.strides[dim]
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return IndexMap(shape, (*self.strides[:dim], *self.strides[dim + 1 :]), offset, self.opaque)

    def reshaped(self, shape: Sequence[int]) -> IndexMap:
        """The same elements in row-major order under another shape; opaque where strides cannot say it."""
        strides = _reshaped_strides(self.shape, self.strides, shape)
        if strides is None:
            return IndexMap(tuple(shape), contiguous(shape), self.offset, next(_KEYS))
        return IndexMap(tuple(shape), strides, self.offset, self.opaque)

    def gathered(self, shape: Sequence[int]) -> IndexMap:
        """Read at positions that other data decides, for a result of `shape`."""
        return IndexMap(tuple(shape), contiguous(shape), 0, next(_KEYS))

    def key(self) -> tuple[object, ...]:
        """Equal for two reads of the same elements in the same order (`torch._inductor.dependencies.MemoryDep`).

        Neighbouring dimensions that run on are one; trailing dimensions that are not used are dropped.
        """
        sizes, strides = merge_dims(self.shape, [self.strides])
        kept = [*zip(sizes, strides[0], strict=True)]
        while kept and kept[-1][1] == 0:
            kept.pop()
        return (self.offset, self.opaque, *kept)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides; dimensions of size 1 get 0, so that they never matter."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step if size != 1 else 0)
        step *= size
    return tuple(reversed(strides))


def merge_dims(shape: Sequence[int], maps: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring dimensions that every map runs through without a gap (`scheduler.simplify_loops`)."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in maps]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        fits = bool(sizes) and all(m[-1] == strides[dim] * size for m, strides in zip(merged, maps, strict=True))
        if fits:
            sizes[-1] *= size
            for m, strides in zip(merged, maps, strict=True):
                m[-1] = strides[dim]
        else:
            sizes.append(size)
            for m, strides in zip(merged, maps, strict=True):
                m.append(strides[dim])
    return tuple(sizes), [tuple(m) for m in merged]


def _reshaped_strides(
    old_shape: Sequence[int], old_strides: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of a row-major reshape, or None if there are none (`at::detail::computeStride`, with broadcasts)."""
    if 0 in shape:  # nothing is read, by any strides
        return contiguous(shape)
    sizes, strides = merge_dims(old_shape, [old_strides])
    result = [0] * len(shape)
    chunks = [*zip(sizes, strides[0], strict=True)]
    dim = len(shape) - 1
    while chunks:
        size, stride = chunks.pop()
        taken = 1
        while dim >= 0 and taken < size:
            if shape[dim] != 1:
                if size % (taken * shape[dim]):
                    return None
                result[dim] = stride * taken
                taken *= shape[dim]
            dim -= 1
        if taken != size:
            return None
    if any(size != 1 for size in shape[: dim + 1]):
        return None
    return tuple(result)
