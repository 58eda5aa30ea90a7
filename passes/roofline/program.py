"""What the roofline knows of a graph before a device is named: ops with FLOPs and bytes, and their fused kernels.

Plain data, small enough to keep for every graph of a process. `extract` and `fusion` make it, `price` reads it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from optpass.passes.roofline.flops import OpCost
from optpass.reporting.model import Phase


@dataclass(slots=True)
class OpInfo:
    """One op of a graph.

    Attributes:
        reads, writes: bytes it moves as a kernel of its own.
        dtype: dtype that its arithmetic runs in, e.g. 'bfloat16'.
        recomputed: a forward op that the partitioner runs again in the backward.
        group: index of the kernel it fuses into; None for views and for what no kernel computes.
        allocates: bytes of the result itself.
    """

    name: str
    target: str
    phase: Phase
    file: str | None
    line: int | None
    module: str | None
    cost: OpCost | None
    reads: int
    writes: int
    dtype: str
    shape: str
    recomputed: bool = False
    group: int | None = None


@dataclass(slots=True)
class GroupInfo:
    """One kernel after fusion.

    Attributes:
        kind: kind of the op that decides its time: 'matmul', 'attention', 'reduction', 'pointwise', ...
        ops: indices into `Program.ops`.
        reads, writes: bytes that cross the kernel's boundary.
        elements: iterations of its largest loop nest.
        inner: length of the innermost reduction, 1 where there is none.
        strided: bytes read across the grain (transposed or gathered), part of `reads`.
    """

    index: int
    phase: Phase
    kind: str
    ops: list[int]
    reads: int
    writes: int
    elements: int = 0
    inner: int = 1
    strided: int = 0


@dataclass
class Program:
    """A graph's ops and kernels, forward and (when training) backward."""

    ops: list[OpInfo] = field(default_factory=list)
    groups: list[GroupInfo] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    #: Distinct bytes of parameters, inputs and saved tensors that the graph touches: its working set.
    working_set: int = 0
