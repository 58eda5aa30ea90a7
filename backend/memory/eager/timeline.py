"""An eager part of a step as plain data: what its operators allocate, in the order in which they run, and what that
comes to at sizes other than those that it was seen at. Nothing here holds a node or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

#: Shape of a tensor, and bytes of an element.
Extent = tuple[tuple[int, ...], int]
Shapes = tuple[tuple[int, ...], ...]
#: A size that is so far from one that changes is taken to change with it: a sequence without its last token.
SHIFT = 1
#: The forward is taken to need this part more: small results live to the end of the expression that they are part of.
LONGER = 0.005
#: Of so many factors a size may be a product: batch, sequence, and one more.
FACTORS = 3


@dataclass(frozen=True)
class Step:
    """One operator.

    Attributes:
        made: what it returned, as far as nobody else counts that; of a view, what the view is of is `root`'s.
        kept: what it returned and the caller holds, who counts it from then on.
        let_go: outputs of the compiled graph, and of what is `old` or `cleared`, that are there no more when it runs.
        given: gradients that its backward is given.
        root: the step that made the storage of the result; -1 where none did.
        inputs: steps whose results it reads, or the call does that it ends.
        goes: gradients that its backward makes, with the steps that they go to; others have negative numbers.
        held: what it alone holds for its backward, beside results of steps.
        inside: allocated and released in its forward.
        passes: its backward hands on what it is given.
        temporaries: tensors as large as a gradient that its backward allocates and releases.
    """

    made: tuple[Extent, ...]
    kept: tuple[Extent, ...]
    let_go: tuple[Extent, ...]
    given: tuple[Extent, ...]
    root: int
    inputs: tuple[int, ...]
    goes: tuple[tuple[int, Extent], ...]
    held: tuple[Extent, ...]
    inside: tuple[Extent, ...]
    passes: bool
    temporaries: int


class Resize:
    """Sizes of tensors of one call of a graph, as they are in another one.

    Args:
        before, now: shapes of what the graph is given in the two calls, parameters aside.
        static: shapes of parameters, whose sizes do not change.
    """

    def __init__(self, before: Shapes, now: Shapes, static: Iterable[Sequence[int]] = ()) -> None:
        self._changed: dict[int, float] = {}
        self._known: dict[tuple[int, ...], float] = {}
        self._fixed = {size for shape in static for size in shape}
        changes = [1.0]
        for old, new in zip(before, now, strict=True):
            for was, size in zip(old, new, strict=True):
                if was == size or was < 1:
                    self._fixed.add(was)
                else:
                    self._changed[was] = max(self._changed.get(was, 0.0), size / was)
            if old != new and prod(old) > 0:
                changes.append(prod(new) / prod(old))
        self.most = max(changes[1:] or changes)  #: times that a tensor is as large as it was which changes, at most

    def bytes(self, extent: Extent) -> int:
        """Bytes of a tensor of the first call in the second."""
        shape, itemsize = extent
        if not self._changed:
            return prod(shape) * itemsize
        if shape not in self._known:
            self._known[shape] = self._times(shape)
        return int(prod(shape) * itemsize * self._known[shape])

    def _times(self, shape: tuple[int, ...]) -> float:
        times, sure, doubtful = 1.0, False, None  # of sizes that may be of parameters, the first is taken to change
        for size in shape:
            found = self._product(size, FACTORS)
            if found is not None and size in self._fixed:
                doubtful = found if doubtful is None and found != 1.0 else doubtful
            elif found is not None and found != 1.0:
                times, sure = times * found, True
        if sure or doubtful is not None:
            return times if sure else doubtful or 1.0
        known = all(size in self._fixed or self._product(size, FACTORS) is not None for size in shape)
        return 1.0 if known else self.most

    def _product(self, size: int, factors: int) -> float | None:
        """By what a size changes that is a product of known ones; None where it is none."""
        if size in self._changed:
            return self._changed[size]
        if size == 1 or (factors < FACTORS and size in self._fixed):
            return 1.0
        for was, times in self._changed.items():
            if was > SHIFT and abs(size - was) <= SHIFT and size not in self._fixed:
                return (size + was * (times - 1)) / size
        if factors == 1:
            return None
        for part in (*sorted(self._changed, reverse=True), *sorted(self._fixed, reverse=True)):
            if part > 1 and size % part == 0 and part != size:
                rest = self._product(size // part, factors - 1)
                if rest is not None:
                    return self._changed.get(part, 1.0) * rest
        return None


#: As it was seen.
AS_SEEN = Resize((), ())


@dataclass(frozen=True)
class Timeline:
    """Liveness of an eager part: its steps as they ran, then the other way round.

    Attributes:
        until: steps whose results are held for the backward, with the last step that holds each there.
        part: the steps that count, from the first to before the last; what others hold counts elsewhere.
        old, cleared: what is there of earlier steps when they begin: results, and gradients that are cleared since.
    """

    steps: tuple[Step, ...]
    until: Mapping[int, int]
    part: range
    old: tuple[Extent, ...] = ()
    cleared: tuple[Extent, ...] = ()

    def kept(self) -> int:
        """Bytes of its results that the caller holds."""
        return sum(_sum(self.steps[i].kept, AS_SEEN) for i in self.part)

    def in_loop(self) -> Timeline:
        """The same behind itself in a loop, whose variables hold its results until they are assigned anew."""
        steps = list(self.steps)
        for i in self.part[:-1]:
            steps[i + 1] = replace(steps[i + 1], let_go=(*steps[i + 1].let_go, *steps[i].kept))
        return replace(self, steps=tuple(steps), old=tuple(one for i in self.part for one in steps[i].kept))

    def held(self, sizes: Resize = AS_SEEN) -> int:
        """Bytes that are held from the forward to the backward."""
        results = sum(self._made(k, sizes) for k, last in self.until.items() if last in self.part)
        return results + sum(_sum(self.steps[i].held, sizes) for i in self.part)

    def without_gradients(self, steps: range) -> int:
        """Most bytes that are allocated at one time while `steps` run, with nothing held for a backward."""
        last = self._last_read()
        live, peak = 0, 0
        for i in steps:
            step = self.steps[i]
            live += self._made(i, AS_SEEN) if step.root == i else 0
            peak = max(peak, live + _sum(step.inside, AS_SEEN))
            live -= sum(self._made(k, AS_SEEN) for k in steps if last[k] == i and self.steps[k].root == k)
        return peak

    def _last_read(self) -> list[int]:
        """Of each step, the last one that reads what it made, or a view of that."""
        last = list(range(len(self.steps)))
        for i, step in enumerate(self.steps):
            for root in (self.steps[k].root for k in step.inputs):
                if root >= 0:
                    last[root] = max(last[root], i)
        return last

    def forward(self, sizes: Resize = AS_SEEN) -> int:
        """Most bytes that are allocated at one time in the forward."""
        last = self._last_read()
        done: dict[int, list[int]] = {}
        for k, at in enumerate(last):
            if self.steps[k].root == k and k not in self.until:
                done.setdefault(at, []).append(k)
        early = [k for k, at in self.until.items() if at < self.part.start]
        live = (old := _sum((*self.old, *self.cleared), sizes)) - sum(self._made(k, sizes) for k in early)
        live -= sum(_sum((*step.held, *step.kept), sizes) for step in self.steps[: self.part.start])
        peak = 0
        for i, step in enumerate(self.steps[: self.part.stop]):
            live += (self._made(i, sizes) if step.root == i else 0) + _sum((*step.held, *step.kept), sizes)
            live -= _sum(step.let_go, sizes)
            if i in self.part:
                peak = max(peak, live + _sum(step.inside, sizes))
            live -= sum(self._made(k, sizes) for k in done.get(i, ()))
        return int(peak + LONGER * max(0, peak - old))

    def backward(self, sizes: Resize = AS_SEEN) -> int:
        """Most bytes that are held at one time in the backward: gradients wait until their step runs; what is saved is
        released when the last step that holds it has run."""
        held = self.held(sizes)
        released: dict[int, list[int]] = {}
        for k, at in self.until.items():
            released.setdefault(at, []).append(k)
        waiting: dict[int, int] = {}
        peak = held
        for i in reversed(self.part):
            step = self.steps[i]
            mine = waiting.pop(i) if i in waiting else _sum(step.given, sizes)
            before = sum(waiting.values())
            for key, extent in step.goes:
                waiting[key] = waiting.get(key, 0) + sizes.bytes(extent)
            new = 0 if step.passes else sum(waiting.values()) - before
            largest = max((sizes.bytes(extent) for _, extent in step.goes), default=0)
            inside = step.temporaries * max(mine, min(largest, new)) if new else 0
            peak = max(peak, held + before + mine + new + inside)
            held -= sum(self._made(k, sizes) for k in released.get(i, ())) + _sum(step.held, sizes)
        return peak

    def _made(self, i: int, sizes: Resize) -> int:
        return _sum(self.steps[i].made, sizes)


def _sum(extents: Iterable[Extent], sizes: Resize) -> int:
    return sum(sizes.bytes(extent) for extent in extents)
