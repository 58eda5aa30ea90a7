"""What is to be computed at one attention site, as plain data: the question that the chooser and the gate answer.

No tensors and no graph here; sizes are hints where shapes are symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

#: What stands between the scores and the softmax, as a kernel sees it. `causal`: key <= query, both counted from 0;
#: `bool` and `float`: an operand that broadcasts to (batch, heads, queries, keys).
MaskKind = Literal["none", "causal", "bool", "float"]


@dataclass(frozen=True)
class Problem:
    """softmax(q kᵀ · scale + mask) v for q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, ·).

    Attributes:
        device: device type, 'cpu' or 'cuda'.
        dtype: dtype of q, k and v as the kernel would get them.
        batch, heads, kv_heads, queries, keys, head_dim, value_dim: sizes.
        mask: see `MaskKind`.
        mask_numel: elements of the mask operand as it is stored (broadcast dims count 1); 0 without one.
        keys_symbolic: True where the number of keys is symbolic: one kernel computes it for many.
        mask_symbolic: True where a size of the mask operand is symbolic: one kernel computes it for many sizes.
        mask_grad: True where the mask operand needs a gradient.
        window: keys a query sees at most, where the mask is proved to be a sliding window; None otherwise.
        score_ops: names of what only a programmable kernel does to a score: 'softcap', 'tensor_scale', 'clamp'.
        dropout: probability with which an attention weight is dropped; 0.0 for none.
        training: True where a backward will be compiled for this site.
        score_dtype: dtype that the softmax was written in (`q.dtype`, or float32 where people upcast).
    """

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    mask: MaskKind = "none"
    mask_numel: int = 0
    keys_symbolic: bool = False
    mask_symbolic: bool = False
    mask_grad: bool = False
    window: int | None = None
    score_ops: frozenset[str] = frozenset()
    dropout: float = 0.0
    training: bool = False
    score_dtype: torch.dtype = torch.float32

    @property
    def keeps_wide(self) -> bool:
        """Whether the program's backward has weights that are wider than its operands."""
        return self.training and self.score_dtype.itemsize > self.dtype.itemsize
