"""The cost record that every counting rule returns.

Here: `OpCost` and the kinds of op. Not here: any rule (one file per family) or the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "matmul",
    "conv",
    "attention",
    "pointwise",
    "reduction",
    "scan",
    "rng",
    "indexing",
    "view",
    "copy",
    "rnn",
    "fft",
    "sort",
    "other",
]

#: M, N, K of one matrix product.
MNK = tuple[int, int, int]


@dataclass(frozen=True)
class OpCost:
    """Arithmetic of one op.

    `flops`: operations, a multiply-add being 2; 0 only where the op does no arithmetic (view, copy, cast,
    gather). `kind`: the family, for grouping and for the choice of peak rate. `mnk`, `batch`: sizes of the
    (implicit) matrix product and how many of them there are, for Tensor Core alignment. Of an op made of
    several products it is the first: QK^T of attention, the input gradient of a backward, the recurrent
    product of an RNN; so `2 * M * N * K * batch` need not equal `flops`. `transcendental`: how many of
    `flops` are exp, log, tanh, erf, sin, sqrt, pow and the like.
    """

    flops: int | float
    kind: Kind
    mnk: MNK | None = None
    batch: int = 1
    transcendental: int = 0
