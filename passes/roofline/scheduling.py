"""Merging kernels whose loop nests fit, the pair that saves most memory traffic first, never making a cycle.

A model of `torch._inductor.scheduler.Scheduler.fuse_nodes` with the rules of its two backends: `CppScheduling`
(loop sizes must match; kernels that share outer loops only are stacked last) and `SIMDScheduling` (Triton: counts of
iterations must match).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from optpass.passes.roofline.kernel import Kernel
from optpass.passes.roofline.lowering import Role
from optpass.passes.roofline.program import GroupInfo, OpInfo
from optpass.reporting.model import Phase

#: Shared bytes below which a merge is not worth it (`config.score_fusion_memory_threshold`).
MIN_SHARED_BYTES = 10
#: Neighbours in the list of a buffer's readers that are considered pairwise; all pairs would grow squared.
MAX_READERS = 64
#: Kernels in one fused kernel (`config.max_fusion_size`).
MAX_FUSION = 64

#: (first, second, second depends on first) -> 0 no, 1 fits, 2 fits by sharing outer loops.
Rules = Callable[[Kernel, Kernel, bool], int]


def rules_for(on_cpu: bool) -> Rules:
    """The backend's rules."""
    return _cpp if on_cpu else _triton


def _cpp(first: Kernel, second: Kernel, dependent: bool) -> int:
    same = first.outer == second.outer and first.inner == second.inner
    prologue = not first.inner and first.outer == second.outer + second.inner
    flat = (
        not first.inner and not second.inner and first.outer_count == second.outer_count
        and (len(first.outer) == 1 or len(second.outer) == 1) and first.shape == second.shape
        and (first if len(first.outer) < len(second.outer) else second).merged == 1
    )  # fmt: skip
    if (same or prologue or flat) and not (first.stacked or second.stacked) and not (dependent and first.inner):
        return 1
    if not dependent:
        return 0
    depth = min(len(first.outer), len(second.outer))
    if depth < 1 or first.outer[:depth] != second.outer[:depth]:
        return 0
    return 2 if all(k.stacked in (0, depth) for k in (first, second)) else 0


def _triton(first: Kernel, second: Kernel, dependent: bool) -> int:
    if first.inner and second.inner:
        return int(first.outer_count == second.outer_count and first.inner_count == second.inner_count)
    if not first.inner and not second.inner:
        return int(first.outer_count == second.outer_count)
    reduction, plain = (first, second) if first.inner else (second, first)
    full = reduction.outer_count * reduction.inner_count
    return int(plain.outer_count in (full, reduction.outer_count))


class Merger:
    """Merges the kernels of one graph.

    Args:
        kernels: in execution order; changed by `run`.
        size: bytes of each buffer.
        writer: the kernel that writes each buffer that one writes.
        outputs: buffers that must exist after the graph.
        rules: the backend's.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        size: Mapping[int, int],
        writer: Mapping[int, int],
        outputs: set[int],
        rules: Rules,
    ) -> None:
        self.size, self.outputs, self.rules = size, outputs, rules
        self.kernels: dict[int, Kernel] = dict(enumerate(kernels))
        self.writer = dict(writer)
        self.readers: dict[int, set[int]] = {}
        for number, kernel in self.kernels.items():
            for buffer, _ in kernel.reads:
                self.readers.setdefault(buffer, set()).add(number)
                source = self.writer.get(buffer)
                if source is not None and source != number:
                    kernel.predecessors.add(source)
                    self.kernels[source].successors.add(number)

    def run(self, infos: Sequence[OpInfo], phase: Phase) -> list[GroupInfo]:
        """Merge what fits, stacking last, and describe what is left; sets `group` of the ops in `infos`."""
        pairs = self._pairs()
        waiting = self._merge_all(pairs, stacking=False)
        while waiting:
            before = len(self.kernels)
            waiting = self._merge_all(waiting, stacking=True)
            if len(self.kernels) == before:
                break
        return self._groups(infos, phase)

    def _merge_all(self, pairs: dict[tuple[int, int], int], stacking: bool) -> dict[tuple[int, int], int]:
        """Merge by falling score. Returns the pairs that fit only by stacking."""
        queue = [(-score, b - a, a, b) for (a, b), score in pairs.items()]
        heapq.heapify(queue)
        waiting: dict[tuple[int, int], int] = {}
        while queue:
            score, _, a, b = heapq.heappop(queue)
            if a not in self.kernels or b not in self.kernels:
                continue
            fit = self._fit(a, b)
            if fit == 2 and not stacking:
                waiting[a, b] = -score
            if fit == 0 or (fit == 2 and not stacking) or self._cycle(a, b):
                continue
            self._merge(a, b, fit)
            for other, value in self._neighbours(a).items():
                low, high = min(a, other), max(a, other)
                heapq.heappush(queue, (-value, high - low, low, high))
        return {pair: score for pair, score in waiting.items() if pair[0] in self.kernels and pair[1] in self.kernels}

    # ---- candidates -------------------------------------------------------------------------------------------

    def _pairs(self) -> dict[tuple[int, int], int]:
        pairs: dict[tuple[int, int], int] = {}
        for buffer in {*self.readers, *self.writer}:
            involved = sorted(k for k in self._involved(buffer) if self.kernels[k].role is not Role.EXTERN)
            for i, a in enumerate(involved):
                for b in involved[i + 1 : i + 1 + MAX_READERS]:
                    pairs[a, b] = pairs.get((a, b), 0) + self._shared(a, b, buffer)
        return {pair: score for pair, score in pairs.items() if score >= MIN_SHARED_BYTES}

    def _involved(self, buffer: int) -> set[int]:
        found = set(self.readers.get(buffer, ()))
        if buffer in self.writer:
            found.add(self.writer[buffer])
        return found

    def _neighbours(self, a: int) -> dict[int, int]:
        found: dict[int, int] = {}
        kernel = self.kernels[a]
        for buffer in {*(buffer for buffer, _ in kernel.reads), *kernel.writes}:
            for other in self._involved(buffer):
                if other != a and self.kernels[other].role is not Role.EXTERN:
                    found[other] = found.get(other, 0) + self._shared(a, other, buffer)
        return {other: score for other, score in found.items() if score >= MIN_SHARED_BYTES}

    def _shared(self, a: int, b: int, buffer: int) -> int:
        """Bytes of `buffer` that both touch at the same positions in the same order."""
        one, two = self._touch(a, buffer), self._touch(b, buffer)
        return sum(min(size, two[key]) for key, size in one.items() if key in two)

    def _touch(self, kernel: int, buffer: int) -> dict[tuple[object, ...], int]:
        item = self.kernels[kernel]
        touched = {key: size for (b, key), size in item.reads.items() if b == buffer}
        if buffer in item.writes:
            key, size = item.writes[buffer]
            touched[key] = size
        return touched

    # ---- legality ---------------------------------------------------------------------------------------------

    def _fit(self, a: int, b: int) -> int:
        one, two = self.kernels[a], self.kernels[b]
        if Role.EXTERN in (one.role, two.role) or one.merged + two.merged > MAX_FUSION:
            return 0
        if a in two.predecessors:
            return self.rules(one, two, True) if self._in_order(one, two) else 0
        if b in one.predecessors:
            return self.rules(two, one, True) if self._in_order(two, one) else 0
        return 1 if 1 in (self.rules(one, two, False), self.rules(two, one, False)) else 0

    @staticmethod
    def _in_order(first: Kernel, second: Kernel) -> bool:
        """Whether `second` reads what `first` writes at the positions and in the order in which it is written."""
        return all(
            key == first.writes[buffer][0] or key[: len(first.writes[buffer][0])] == first.writes[buffer][0]
            for buffer, key in second.reads if buffer in first.writes
        )  # fmt: skip

    def _cycle(self, a: int, b: int) -> bool:
        """Whether something outside lies on a path between the two."""
        return self._path_around(a, b) or self._path_around(b, a)

    def _path_around(self, start: int, end: int) -> bool:
        latest = self.kernels[end].last
        stack = [k for k in self.kernels[start].successors if k != end]
        seen = set(stack)
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

    def _merge(self, a: int, b: int, fit: int) -> None:
        """Put `b` into `a`."""
        one, two = self.kernels[a], self.kernels.pop(b)
        if fit == 2:
            one.stacked = max(one.stacked, two.stacked) or min(len(one.outer), len(two.outer))
        if not one.inner and (two.inner or len(two.outer) > len(one.outer)):
            one.outer, one.inner, one.shape, one.role = two.outer, two.inner, two.shape, two.role
        one.ops = [*dict.fromkeys((*one.ops, *two.ops))]
        for key, size in two.reads.items():
            one.reads[key] = max(one.reads.get(key, 0), size)
        one.writes |= two.writes
        one.merged += two.merged
        one.strided += two.strided
        one.first, one.last = min(one.first, two.first), max(one.last, two.last)
        for buffer, _ in two.reads:
            self.readers[buffer].discard(b)
            self.readers[buffer].add(a)
        for buffer in two.writes:
            self.writer[buffer] = a
        for other in two.predecessors - {a}:
            self.kernels[other].successors.discard(b)
            self.kernels[other].successors.add(a)
        for other in two.successors - {a}:
            self.kernels[other].predecessors.discard(b)
            self.kernels[other].predecessors.add(a)
        one.predecessors = (one.predecessors | two.predecessors) - {a, b}
        one.successors = (one.successors | two.successors) - {a, b}

    # ---- result -----------------------------------------------------------------------------------------------

    def _groups(self, infos: Sequence[OpInfo], phase: Phase) -> list[GroupInfo]:
        groups: list[GroupInfo] = []
        for number, kernel in sorted(self.kernels.items(), key=lambda item: item[1].last):
            writes = sum(
                size for buffer, (_, size) in kernel.writes.items()
                if buffer in self.outputs or self.readers.get(buffer, set()) - {number}
            )  # fmt: skip
            index = len(groups)
            for op in kernel.ops:
                if infos[op].group is None:
                    infos[op].group = index
            elements = kernel.outer_count * kernel.inner_count
            groups.append(
                GroupInfo(
                    index=index,
                    phase=phase,
                    kind=self._kind(kernel, infos),
                    ops=kernel.ops,
                    reads=self._read_bytes(kernel),
                    writes=writes,
                    elements=elements,
                    inner=kernel.inner_count,
                    strided=kernel.strided,
                )
            )
        return groups

    def _read_bytes(self, kernel: Kernel) -> int:
        """Bytes read from outside: parts of a buffer add up, to the whole of it at most."""
        per_buffer: dict[int, int] = {}
        for (buffer, _), size in kernel.reads.items():
            if buffer not in kernel.writes:
                per_buffer[buffer] = min(self.size[buffer], per_buffer.get(buffer, 0) + size)
        return sum(per_buffer.values())

    @staticmethod
    def _kind(kernel: Kernel, infos: Sequence[OpInfo]) -> str:
        if kernel.role is Role.EXTERN:
            cost = infos[kernel.ops[-1]].cost
            return cost.kind if cost is not None else "other"
        return "reduction" if kernel.inner else "pointwise"
