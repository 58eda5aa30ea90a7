"""The blocks that torch's CUDA allocator gives for requests, and so the bytes that it counts as allocated.

`torch.cuda.max_memory_allocated` counts blocks, not requests. A request above 1 MiB gets the smallest free block that
holds it, and the rest of that block goes with it where it is no larger than 1 MiB. What is free follows from all that
was allocated and released before, so that is run through the same rules here (c10/cuda/CUDACachingAllocator.cpp, torch
2.11 to 2.15, without `expandable_segments` and other settings): best fit, splitting, merging with free neighbours.
Replaying the allocations of a step recorded on an H100 from the state that they began in gives the same peak to the
byte; from an empty pool peaks of three models were off by 1.0 to 1.8 MB. What the later steps of a process find in the
pool is what the first ones left there, so the allocations are run through again, and the most that any of them needs is
taken (`more_in_later_steps`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

#: Blocks are multiples of this (`kMinBlockSize`), and those of small requests are split down to it.
BLOCK = 512
#: Requests up to here are small (`kSmallSize`) and cut from segments of `_SMALL_SEGMENT`; a rest of a large one up to
#: here is not split off.
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
#: How often the allocations of a step are run through again, and a part of the peak for what else was allocated from
#: the pool of a process: without it predictions were up to 0.23% too low for four models on an H200
#: (`tests/backend/memory/test_on_gpu.py` asks). In a pool that other things have left in pieces it can be more.
_AGAIN, _DOUBT = 2, 1 / 650
#: Large requests below `_OWN` (`kMinLargeAlloc`) share segments of `_SHARED_SEGMENT` (`kLargeBuffer`); others have one
#: of their own, a multiple of `_ROUND`.
_OWN, _SHARED_SEGMENT, _ROUND = 10 << 20, 20 << 20, 2 << 20


@dataclass
class _Block:
    """A piece of a segment, and the pieces beside it."""

    size: int
    small: bool
    number: int
    free: bool = False
    before: _Block | None = field(default=None, repr=False)
    behind: _Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.number


class CachingAllocator:
    """One device's pools, empty at the start; segments are never given back.

    Attributes:
        allocated, peak: bytes of the blocks in use, and the most there were.
    """

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self._log: list[tuple[bool, int]] = []  # an allocation and its bytes, or a release and which one's
        self._made = 0
        self._places: dict[int, int] = {}  # of blocks in use, by number: which allocation made them
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}
        self._last = 0

    def allocate(self, nbytes: int) -> int:
        """A block for so many bytes: its number, for `size` and `release`."""
        number = self._allocate(nbytes)
        self._places[number] = self._made
        self._made += 1
        self._log.append((True, nbytes))
        return number

    def _allocate(self, nbytes: int) -> int:
        size = max(BLOCK, rounded(nbytes))
        small = size <= _SMALL
        pool = self._pools[small]
        at = bisect.bisect_left(pool, (size, 0))
        block = self._blocks[pool.pop(at)[1]] if at < len(pool) else self._new(segment_bytes(size), small)
        block.free = False
        rest = block.size - size
        if rest >= BLOCK if small else rest > _SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block.number

    def size(self, number: int) -> int:
        """Bytes of a block."""
        return self._blocks[number].size

    def release(self, number: int) -> None:
        """A block is free again."""
        if number in self._places:  # else all were released together
            self._log.append((False, self._places.pop(number)))
            self._release(number)

    def more_in_later_steps(self) -> int:
        """Bytes by which the peak of later steps, with the same allocations, is higher than the one so far. Everything
        is released."""
        if not self._log:
            return 0
        first, most = self.peak, self.peak
        for number in self._places:
            self._release(number)
        for _ in range(_AGAIN):
            self.peak = 0
            blocks: list[int] = []
            held: set[int] = set()
            for allocates, what in self._log:
                if allocates:
                    held.add(len(blocks))
                    blocks.append(self._allocate(what))
                else:
                    held.discard(what)
                    self._release(blocks[what])
            for place in held:
                self._release(blocks[place])
            most = max(most, self.peak)
        self._log, self._places = [], {}
        return most - first + int(first * _DOUBT)

    def _release(self, number: int) -> None:
        block = self._blocks[number]
        self.allocated -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.free:
                pool = self._pools[other.small]
                pool.pop(bisect.bisect_left(pool, other.key))
                block = self._merged(*((other, block) if other is block.before else (block, other)))
        block.free = True
        bisect.insort(self._pools[block.small], block.key)

    def _new(self, size: int, small: bool) -> _Block:
        # Later segments have higher numbers, as they mostly have higher addresses.
        self._last += 1 << 20
        return self._blocks.setdefault(self._last, _Block(size, small, self._last))

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.small, block.number + 1, True, block, block.behind)
        while rest.number in self._blocks:
            rest.number += 1
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        self._blocks[rest.number] = rest
        bisect.insort(self._pools[rest.small], rest.key)

    def _merged(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.behind = right.behind
        if right.behind is not None:
            right.behind.before = left
        del self._blocks[right.number]
        return left


def rounded(nbytes: int) -> int:
    """The multiple of `BLOCK` that a request is rounded up to."""
    return -(-nbytes // BLOCK) * BLOCK


def segment_bytes(size: int) -> int:
    """Bytes of a new segment for a block of `size` bytes."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _SHARED_SEGMENT if size < _OWN else -(-size // _ROUND) * _ROUND
