"""What the backward of an eager operator allocates and releases inside itself, of which nothing can be seen.

Read from torch's sources, or measured; the tables name nodes by parts of their names.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from optpass.backend.compat import memory_autograd as autograd
from optpass.backend.compat.memory_backward import Held

#: Names of nodes whose result is another view of what they were given, and whose gradient is one too.
VIEWS = ("View", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias", "TBackward", "Detach", "Movedim", "Unflatten")
#: Views whose gradient is as large as what the view is of, and new.
PARTS = ("Slice", "Select", "Split", "Unbind", "Narrow", "AsStrided", "Diagonal", "Expand", "Chunk", "Unfold")
#: Nodes that pass the gradient on as it is.
SAME_GRADIENT = ("AddBackward", "SumBackward")
#: Tensors as large as the gradient that a node's backward allocates and releases inside itself
#: (torch/csrc/autograd/FunctionsManual.cpp, derivatives.yaml); of one that is not known and saves tensors, `UNKNOWN`.
TEMPORARIES = {
    "PowBackward0": 2, "PowBackward1": 5, "SqrtBackward": 1, "RsqrtBackward": 2, "AbsBackward": 1, "VarBackward": 2,
    "StdBackward": 1, "NormBackward": 1, "ClampBackward": 1, "ClampMin": 1, "ClampMax": 1, "MaxBackward": 1,
    "MinBackward": 1, "TopkBackward": 1, "SortBackward": 1, "L1Loss": 1, "KlDiv": 1, "WhereBackward": 1,
    "BinaryCrossEntropy": 0,
    "MulBackward": 0, "ExpBackward": 0, "LogBackward": 0, "SigmoidBackward": 0,
    "TanhBackward": 0, "ReluBackward": 0, "GeluBackward": 0, "SiluBackward": 0, "SoftplusBackward": 0,
    "SoftmaxBackward": 0, "MseLoss": 0, "NllLoss": 0, "SmoothL1Loss": 0, "HuberLoss": 0, "MmBackward": 0,
    "BmmBackward": 0, "AddmmBackward": 0, "MeanBackward": 0, "SumBackward": 0, "NativeDropout": 0, "LayerNorm": 0,
    "Embedding": 0, "Copy": 0, "Clone": 0, "IndexBackward": 0, "GatherBackward": 0, "SubBackward": 0, "Maximum": 2,
    "Minimum": 2, "Erf": 4, "Acos": 5, "Asin": 4, "Atan2": 6,
}  # fmt: skip
#: The same of a quotient whose divisor needs a gradient, and of one whose divisor does not.
QUOTIENT, FRACTION = 3, 0
WEIGHTED = 2  #: more, of a binary cross entropy whose positives weigh otherwise
#: Nodes that make one more, where they add up the gradient of an operand that was broadcast.
BROADCAST = ("MulBackward", "SubBackward", "Maximum", "Minimum")
UNKNOWN = 2


def temporaries_of(node: Any, known: Held | None = None) -> int:
    """See `TEMPORARIES`.

    Args:
        known: what it holds, as far as that says more.
    """
    if named(node, ("DivBackward",)):
        return QUOTIENT if len(node.next_functions) > 1 and node.next_functions[1][0] is not None else FRACTION
    cast = known is not None and named(node, ("MulBackward",)) and not all(one.floating for one in known.outside)
    number = next((number for name, number in TEMPORARIES.items() if name in node.name()), None)
    if number is not None:
        number += WEIGHTED if known is not None and _is_weighted(node) else 0
        return number + cast + (named(node, BROADCAST) and _adds_up(node))
    views = named(node, (*VIEWS, *PARTS, *SAME_GRADIENT))
    return UNKNOWN if not views and any(is_tensor(node, n) for n in autograd.saved_names(node)) else 0


def _is_weighted(node: Any) -> bool:
    """Whether a binary cross entropy weighs its positives; asked before its backward releases that."""
    return named(node, ("CrossEntropyWithLogits",)) and is_tensor(node, "_saved_pos_weight")


def _adds_up(node: Any) -> bool:
    """Whether the gradient of an operand is the sum of one as large as the result."""
    size = max((prod(shape) for shape, _ in autograd.output_extents(node)), default=0)
    operands = [autograd.output_extents(n)[i : i + 1] for n, i in node.next_functions if n is not None]
    return any(prod(shape) < size for extents in operands for shape, _ in extents)


def named(node: Any, kinds: tuple[str, ...]) -> bool:
    return any(kind in node.name() for kind in kinds)


def is_cut(node: Any) -> bool:
    """Whether a view is a part with gaps: logits without those of the last token."""
    if not named(node, ("SliceBackward",)):
        return False
    sizes, dim = node._saved_self_sym_sizes, node._saved_dim
    dim -= 1 << 64 if dim >= 1 << 63 else 0  # autograd shows a negative dim as a number without a sign
    return any(size != 1 for size in sizes[: dim % len(sizes)])


def is_tensor(node: Any, name: str) -> bool:
    try:
        if autograd.is_packed(node, name):
            return True
        value = getattr(node, name)
    except RuntimeError:
        return True  # released
    return isinstance(value, torch.Tensor)
