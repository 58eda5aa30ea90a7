"""What an executor that fuses never stores: results that are computed inside the kernels that read them.

A model of TorchInductor's lowering over the steps of a schedule (as `roofline.fusion` has it for times): a pointwise
result is inlined into its readers unless a kernel of its own reads it, it is returned or kept, or it is reused and
dear; a stored one still vanishes where all its readers fall into one kernel. What it is made of then lives on to where
it is read. A result may take the place of an input of its size that is read there for the last time. Without a fusing
executor nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optpass.passes.memory.problem import Operation
from optpass.passes.roofline.fusion import REALIZE_ACCUMULATED_READS, REALIZE_READS

Bytes = NDArray[np.int64]


@dataclass
class Steps:
    """Steps in order, and the values that they make and read.

    Attributes:
        operations: operation of each step.
        storage, birth: of each value: its storage, and the step that makes it; -1 for one that is there before.
        uses: for each value, the steps that read it, ascending.
        reads: for each step, the values that it reads.
    """

    operations: Sequence[int]
    storage: Sequence[int]
    birth: Sequence[int]
    uses: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]


@dataclass
class Stored:
    """What is stored, and until when.

    Attributes:
        inside: for each step, whether its result is computed inside its readers.
        last: for each value, the last step at which it is read; that which makes it where nobody does.
        bytes: of each value; 0 where it is never stored.
        overwritten: for each step, bytes of its results that take the place of inputs.
    """

    inside: list[bool]
    last: Bytes
    bytes: Bytes
    overwritten: Bytes


class Fusion:
    """The model for the operations of one problem.

    Args:
        operations: of the problem.
        sizes: bytes of its storages.
    """

    def __init__(self, operations: Sequence[Operation], sizes: Bytes) -> None:
        self.sizes = sizes
        self.any = any(o.fusing.inlined for o in operations)
        self._inlined = [o.fusing.inlined and len(o.outputs) == 1 for o in operations]
        self._reads = [o.fusing.reads for o in operations]
        self._heavy = [o.fusing.heavy for o in operations]
        self._overwrites = np.array([o.fusing.overwrites for o in operations], dtype=bool)

    def stored(self, steps: Steps, lasting: Collection[int]) -> Stored:
        """What of `steps` is stored. `lasting`: storages that live on behind the last step."""
        if not self.any:
            return self._alone(steps)
        inside = self._inside(steps, lasting)
        last = self._last(steps, inside)
        storage = np.asarray(steps.storage, dtype=np.int64)
        birth = np.asarray(steps.birth, dtype=np.int64)
        size = self.sizes[storage]
        hidden = np.array([b >= 0 and inside[b] for b in steps.birth], dtype=bool)
        size[hidden] = 0
        return Stored(inside, last, size, self._overwritten(steps, lasting, storage, birth, last, size))

    def _alone(self, steps: Steps) -> Stored:
        """Every step is a kernel of its own."""
        last = np.array([u[-1] if u else b for u, b in zip(steps.uses, steps.birth, strict=True)], dtype=np.int64)
        n = len(steps.operations)
        sizes = self.sizes[np.asarray(steps.storage, dtype=np.int64)]
        return Stored([False] * n, last, sizes, np.zeros(n, dtype=np.int64))

    def _inside(self, steps: Steps, lasting: Collection[int]) -> list[bool]:
        """Step by step, as Inductor lowers: what is inlined hands on what it reads."""
        operations = steps.operations
        kernels = [0]  # kernels of their own before each step
        for o in operations:
            kernels.append(kernels[-1] + (not self._reads[o]))
        inside = [False] * len(operations)
        count = [0] * len(operations)  # stored values that each step reads
        heavy = [False] * len(operations)
        for value, step in enumerate(steps.birth):
            if step < 0 or not self._inlined[operations[step]]:
                continue
            number, dear = 0, self._heavy[operations[step]]
            for read in steps.reads[step]:
                made = steps.birth[read]
                hidden = made >= 0 and inside[made]
                number += count[made] if hidden else 1
                dear = dear or (hidden and heavy[made])
            count[step], heavy[step] = number, dear
            uses = steps.uses[value]
            if not uses or steps.storage[value] in lasting or not all(self._reads[operations[u]] for u in uses):
                continue
            reused = len(uses) > 1 and (dear or number > REALIZE_READS)
            stored = reused or number > REALIZE_ACCUMULATED_READS
            inside[step] = not stored or kernels[uses[-1]] == kernels[step]
            if stored:  # within one kernel
                count[step], heavy[step] = 1, False
        return inside

    def _last(self, steps: Steps, inside: Sequence[bool]) -> Bytes:
        end = list(range(len(steps.operations)))  # last step at which what a step does is done
        last = [0] * len(steps.storage)
        for value in range(len(last) - 1, -1, -1):
            uses, birth = steps.uses[value], steps.birth[value]
            last[value] = max(end[u] for u in uses) if uses else birth
            if birth >= 0 and inside[birth]:
                end[birth] = last[value]
        return np.array(last, dtype=np.int64)

    def _overwritten(
        self, steps: Steps, lasting: Collection[int], storage: Bytes, birth: Bytes, last: Bytes, size: Bytes
    ) -> Bytes:
        n = len(steps.operations)
        found = np.zeros(n, dtype=np.int64)
        if not n or not len(storage):
            return found
        at = np.asarray(steps.operations, dtype=np.int64)
        lives_on = np.isin(storage, np.fromiter(lasting, dtype=np.int64, count=len(lasting)))
        most = int(size.max(initial=0)) + 1
        dying = (last > birth) & ~lives_on & (size > 0)
        results = (birth >= 0) & (size > 0)
        results[results] = self._overwrites[at[birth[results]]]
        free = last[dying] * most + size[dying]
        taken = np.isin(birth * most + size, free) & results
        np.add.at(found, birth[taken], size[taken])
        return found
