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
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from optpass.passes.memory.problem import Operation
from optpass.passes.roofline.fusion import REALIZE_ACCUMULATED_READS, REALIZE_READS

Bytes = NDArray[np.int64]


class Steps:
    """Steps in order, and the values that they make and read.

    Attributes:
        operations: operation of each step.
        storage, birth: of each value: its storage, and the step that makes it; -1 for one that is there before.
        reads: for each step, the values that it reads.
        read, reader: for each of these reads, step by step: the value, and the step.
        last: of each value, the last step that reads it; that which makes it where nobody does.
    """

    def __init__(self, operations: Sequence[int], storage: Bytes, birth: Bytes, reads: Sequence[Sequence[int]]) -> None:
        self.operations, self.storage, self.birth, self.reads = operations, storage, birth, reads
        n = len(operations)
        counts = np.fromiter(map(len, reads), dtype=np.int64, count=n)
        self.read = np.fromiter(chain.from_iterable(reads), dtype=np.int64, count=int(counts.sum()))
        self.reader = np.repeat(np.arange(n), counts)
        self.last = birth.copy()
        self.last[self.read] = self.reader  # of equal places, the last one counts


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
        given: storages that are there throughout, and are no values of the steps.
    """

    def __init__(self, operations: Sequence[Operation], sizes: Bytes, given: Collection[int] = ()) -> None:
        self.sizes = sizes
        self.any = any(o.fusing.inlined for o in operations)
        self._inlined = np.array([o.fusing.inlined and len(o.outputs) == 1 for o in operations], dtype=bool)
        self._reads = np.array([o.fusing.reads for o in operations], dtype=bool)
        self._heavy = [o.fusing.heavy for o in operations]
        #: What each operation reads that is there throughout; numbered below 0, values from 0 on.
        self._given = [frozenset(-1 - s for s in o.inputs if s in given) for o in operations]
        self._overwrites = np.array([o.fusing.overwrites for o in operations], dtype=bool)

    def stored(self, steps: Steps, lasting: NDArray[np.bool_]) -> Stored:
        """What of `steps` is stored. `lasting`: for each storage, whether it lives on behind the last step."""
        n = len(steps.operations)
        size = self.sizes[steps.storage]
        if not self.any:  # every step is a kernel of its own
            return Stored([False] * n, steps.last.copy(), size, np.zeros(n, dtype=np.int64))
        lives_on = lasting[steps.storage]
        inside = self._inside(steps, lives_on)
        last = self._last(steps, inside)
        made = steps.birth >= 0
        size[made] *= ~np.array(inside, dtype=bool)[steps.birth[made]]
        return Stored(inside, last, size, self._overwritten(steps, lives_on, last, size))

    def _inside(self, steps: Steps, lives_on: NDArray[np.bool_]) -> list[bool]:
        """Step by step, as Inductor lowers: what is inlined hands on what it reads."""
        operations, reads, n = steps.operations, steps.reads, len(steps.operations)
        inside = [False] * n
        if not n:
            return inside
        at = np.array(operations, dtype=np.int64)
        alone = ~self._reads[at]
        kernels = np.cumsum(alone) - alone  # kernels of their own before each step
        uses = np.bincount(steps.read, minlength=len(steps.storage))
        wanted = (steps.birth >= 0) & (uses > 0) & ~lives_on
        wanted[steps.read[alone[steps.reader]]] = False
        wanted[wanted] = self._inlined[at[steps.birth[wanted]]]
        values = np.flatnonzero(wanted)
        made = steps.birth[values]
        whole = (kernels[steps.last[values]] == kernels[made]).tolist()  # within one kernel
        reused = (uses[values] > 1).tolist()
        #: Values inside: the stored ones that they read, each once, and whether they are dear.
        hidden: dict[int, tuple[frozenset[int], bool]] = {}
        for value, step, together, again in zip(values.tolist(), made.tolist(), whole, reused, strict=True):
            behind, dear = self._given[operations[step]], self._heavy[operations[step]]
            for read in reads[step]:
                if read in hidden:
                    more, heavy = hidden[read]
                    behind = behind | more
                    dear = dear or heavy
                else:
                    behind = behind | {read}
            number = len(behind)
            stored = number > REALIZE_ACCUMULATED_READS or (again and (dear or number > REALIZE_READS))
            if not stored or together:
                inside[step] = True
                hidden[value] = (frozenset((value,)), False) if stored else (behind, dear)
        return inside

    def _last(self, steps: Steps, inside: Sequence[bool]) -> Bytes:
        """What a step inside others reads is read to where these are done."""
        found = steps.last.copy()
        if not inside:
            return found
        hidden = np.flatnonzero(np.array(inside, dtype=bool)[steps.birth] & (steps.birth >= 0))
        last: list[int] = found.tolist()
        for value, made in zip(hidden[::-1].tolist(), steps.birth[hidden[::-1]].tolist(), strict=True):
            end = last[value]
            for read in steps.reads[made]:
                if last[read] < end:
                    last[read] = end
        return np.array(last, dtype=np.int64)

    def _overwritten(self, steps: Steps, lives_on: NDArray[np.bool_], last: Bytes, size: Bytes) -> Bytes:
        n, birth = len(steps.operations), steps.birth
        found = np.zeros(n, dtype=np.int64)
        if not n or not len(birth):
            return found
        at = np.asarray(steps.operations, dtype=np.int64)
        most = int(size.max(initial=0)) + 1
        dying = (last > birth) & ~lives_on & (size > 0)
        results = (birth >= 0) & (size > 0)
        results[results] = self._overwrites[at[birth[results]]]
        free = last[dying] * most + size[dying]
        taken = np.isin(birth * most + size, free) & results
        np.add.at(found, birth[taken], size[taken])
        return found
