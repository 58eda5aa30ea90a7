"""Merging kernels whose loop nests fit, the pair that saves most memory traffic first, never making a cycle.

A model of `torch._inductor.scheduler.Scheduler.fuse_nodes`; see `fusion` for what comes before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from optpass.passes.roofline.kernel import Kernel, Read, merged
from optpass.passes.roofline.lowering import Role
from optpass.passes.roofline.program import GroupInfo, OpInfo
from optpass.report.model import Phase

#: Shared bytes below which a merge is not worth it (`config.score_fusion_memory_threshold`).
MIN_SHARED_BYTES = 10
#: Kernels that read one buffer and are considered pairwise; beyond it only neighbours are, as pairs grow squared.
MAX_READERS = 64
#: Kernels in one fused kernel (`config.max_fusion_size`).
MAX_FUSION = 64


class Merger:
    """Merges the kernels of one graph.

    Args:
        kernels: in execution order.
        size: bytes of each buffer.
        writer: the kernel that writes each buffer that one writes.
        outputs: buffers that must exist after the graph.
        infos: all ops of the program; `group` is set for those in a kernel.
        phase: of the graph.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        size: Mapping[int, int],
        writer: Mapping[int, int],
        outputs: set[int],
        infos: Sequence[OpInfo],
        phase: Phase,
    ) -> None:
        self.size, self.writer, self.outputs, self.infos, self.phase = size, writer, outputs, infos, phase
        self.kernels: dict[int, Kernel] = dict(enumerate(kernels))
        self.alias = list(range(len(kernels)))
        self.readers: dict[int, set[int]] = {}
        for number, kernel in self.kernels.items():
            for read in kernel.reads:
                self.readers.setdefault(read.buffer, set()).add(number)
                writer_of = writer.get(read.buffer)
                if writer_of is not None and writer_of != number:
                    kernel.predecessors.add(writer_of)
                    self.kernels[writer_of].successors.add(number)

    def run(self) -> list[GroupInfo]:
        """Merge what fits, and describe what is left, in execution order."""
        queue = [(-score, a, b) for (a, b), score in self._pairs().items()]
        heapq.heapify(queue)
        while queue:
            score, a, b = heapq.heappop(queue)
            if a not in self.kernels or b not in self.kernels:
                continue
            if not self._fits(a, b) or self._cycle(a, b):
                continue
            self._merge(a, b)
            for other, value in self._neighbours(a).items():
                heapq.heappush(queue, (-value, min(a, other), max(a, other)))
        return self._groups()

    # ---- candidates -------------------------------------------------------------------------------------------

    def _pairs(self) -> dict[tuple[int, int], int]:
        pairs: dict[tuple[int, int], int] = {}
        for buffer, readers in self.readers.items():
            involved = sorted({*readers, *([self.writer[buffer]] if buffer in self.writer else [])})
            involved = [k for k in involved if self.kernels[k].role is not Role.EXTERN]
            for i, a in enumerate(involved):
                for b in involved[i + 1 : i + 1 + MAX_READERS]:
                    pairs[a, b] = pairs.get((a, b), 0) + self._shared(a, b, buffer)
        return {pair: score for pair, score in pairs.items() if score >= MIN_SHARED_BYTES}

    def _neighbours(self, a: int) -> dict[int, int]:
        found: dict[int, int] = {}
        kernel = self.kernels[a]
        for buffer in {*(r.buffer for r in kernel.reads), *kernel.writes}:
            near = {*self.readers.get(buffer, ())}
            if buffer in self.writer:
                near.add(self._root(self.writer[buffer]))
            for other in near:
                if other != a and other in self.kernels and self.kernels[other].role is not Role.EXTERN:
                    found[other] = found.get(other, 0) + self._shared(a, other, buffer)
        return {other: score for other, score in found.items() if score >= MIN_SHARED_BYTES}

    def _shared(self, a: int, b: int, buffer: int) -> int:
        """Bytes of `buffer` that both touch in the same order."""
        one, two = self._touch(a, buffer), self._touch(b, buffer)
        return max((min(x, two[order]) for order, x in one.items() if order in two), default=0)

    def _touch(self, kernel: int, buffer: int) -> dict[tuple[object, ...], int]:
        item = self.kernels[kernel]
        touched = {r.order: r.bytes for r in item.reads if r.buffer == buffer}
        if buffer in item.writes:
            touched[()] = item.writes[buffer]
        return touched

    # ---- legality ---------------------------------------------------------------------------------------------

    def _fits(self, a: int, b: int) -> bool:
        one, two = self.kernels[a], self.kernels[b]
        if Role.EXTERN in (one.role, two.role) or one.size + two.size > MAX_FUSION:
            return False
        if b in one.predecessors:
            one, two = two, one
        return self._loops_fit(one, two) and self._reads_in_order(one, two)

    @staticmethod
    def _loops_fit(first: Kernel, second: Kernel) -> bool:
        """`first` runs before `second` or beside it."""
        if first.inner > 1 and second.inner > 1:
            return first.outer == second.outer and first.inner == second.inner and first.last == second.last
        if first.inner == 1 and second.inner == 1:
            return first.outer == second.outer
        reduction, plain = (first, second) if first.inner > 1 else (second, first)
        full = reduction.outer * reduction.inner
        if plain is second:  # an epilogue: on the reduced result, or on the rows again when they are innermost
            return plain.outer == reduction.outer or (plain.outer == full and reduction.last)
        return plain.outer in (full, reduction.outer)

    def _reads_in_order(self, first: Kernel, second: Kernel) -> bool:
        """`second` reads what `first` writes in the order that it is written."""
        return not any(read.buffer in first.writes and read.order for read in second.reads)

    def _cycle(self, a: int, b: int) -> bool:
        """True if something outside lies on a path between the two."""
        return self._path_around(a, b) or self._path_around(b, a)

    def _path_around(self, start: int, end: int) -> bool:
        latest = self.kernels[end].position
        stack = [k for k in self.kernels[start].successors if k != end]
        seen: set[int] = set(stack)
        while stack:
            current = stack.pop()
            if current == end:
                return True
            if self.kernels[current].first > latest:
                continue
            for following in self.kernels[current].successors:
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        return False

    # ---- merging ----------------------------------------------------------------------------------------------

    def _root(self, number: int) -> int:
        while self.alias[number] != number:
            self.alias[number] = self.alias[self.alias[number]]
            number = self.alias[number]
        return number

    def _merge(self, a: int, b: int) -> None:
        """Put `b` into `a`."""
        one, two = self.kernels[a], self.kernels.pop(b)
        self.alias[b] = a
        if two.inner > 1:
            one.outer, one.inner, one.last, one.role = two.outer, two.inner, two.last, two.role
        one.members = [*dict.fromkeys((*one.members, *two.members))]
        one.reads = merged((*one.reads, *two.reads))
        one.writes |= two.writes
        one.size += two.size
        one.first, one.position = min(one.first, two.first), max(one.position, two.position)
        for read in two.reads:
            self.readers[read.buffer].discard(b)
            self.readers[read.buffer].add(a)
        for other in two.predecessors - {a}:
            self.kernels[other].successors.discard(b)
            self.kernels[other].successors.add(a)
        for other in two.successors - {a}:
            self.kernels[other].predecessors.discard(b)
            self.kernels[other].predecessors.add(a)
        one.predecessors = (one.predecessors | two.predecessors) - {a, b}
        one.successors = (one.successors | two.successors) - {a, b}

    # ---- result -----------------------------------------------------------------------------------------------

    def _groups(self) -> list[GroupInfo]:
        groups = []
        for number, kernel in sorted(self.kernels.items(), key=lambda item: item[1].position):
            reads, strided = self._read_bytes(kernel)
            writes = sum(
                size for buffer, size in kernel.writes.items()
                if buffer in self.outputs or self.readers.get(buffer, set()) - {number}
            )  # fmt: skip
            index = len(groups)
            for op in kernel.members:
                if self.infos[op].group is None:
                    self.infos[op].group = index
            groups.append(
                GroupInfo(
                    index=index, phase=self.phase, kind=self._kind(kernel), ops=kernel.members,
                    reads=reads, writes=writes, elements=kernel.outer * kernel.inner, inner=kernel.inner,
                    strided=strided,
                )  # fmt: skip
            )
        return groups

    def _read_bytes(self, kernel: Kernel) -> tuple[int, int]:
        """Bytes read from outside, and the part of them that is read across the grain."""
        per_buffer: dict[int, list[Read]] = {}
        for read in kernel.reads:
            if read.buffer not in kernel.writes:
                per_buffer.setdefault(read.buffer, []).append(read)
        total = strided = 0
        for buffer, reads in per_buffer.items():
            amount = min(self.size[buffer], max(r.bytes for r in reads) if _same_part(reads) else sum(r.bytes for r in reads))
            total += amount
            if any(r.order for r in reads):
                strided += amount
        return total, strided

    def _kind(self, kernel: Kernel) -> str:
        if kernel.role is Role.EXTERN:
            cost = self.infos[kernel.members[-1]].cost
            return cost.kind if cost is not None else "other"
        return "reduction" if kernel.inner > 1 else "pointwise"


def _same_part(reads: list[Read]) -> bool:
    """One part of a buffer read in several orders is loaded once; several parts add up. Parts are told by size only."""
    return len({r.bytes for r in reads}) == len(reads) == 1
