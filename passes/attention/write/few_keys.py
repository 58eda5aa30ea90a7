"""SDPA over fewer keys than a vector register holds, on a CPU.

Without a mask, torch's flash attention there takes the largest score of such a row by a comparison that leaves NaN out
(found in 2.13, by running it): the row of a query with a NaN comes out as zeros. With one it does not. Where the mask
is proved causal this is left as it is: NaN in a key that an operand hides would reach the row.
"""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.attention.write.emit import Writer, tensor_of

#: Numbers of float32 in the widest register: half precision is widened to that, and of float64 fewer are enough.
LANES = 16


def loses_nan(device: str, key: fx.Node) -> bool:
    """Whether the kernel does; a number of keys that is only known when it runs is trusted."""
    keys = tensor_of(key).shape[-2]
    return device == "cpu" and isinstance(keys, int) and keys < LANES


def all_seen(writer: Writer, key: fx.Node) -> fx.Node:
    """A mask, [1, keys], that hides none."""
    keys = tensor_of(key)
    return writer.call(torch.ones, (1, keys.shape[-2]), dtype=torch.bool, device=keys.device)
