"""Heads among the batch, where the program wants its result as [batch, heads, rows, width] lies in memory.

SDPA's kernels but cuDNN's write [batch, rows, heads, width], which is what a program wants that joins the heads next.
For one that returns the result as it is, or takes views of it, it would be copied. A kernel that is given each head as
a batch item of its own, which is a view of most operands, writes what the program wants.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import fx

from optpass.passes.attention.plans.plan import Plan
from optpass.passes.attention.write.emit import Writer, tensor_of

#: Batch items that kernels for GPUs take at most: the bound of a grid's second and third dims (CUDA C++ guide, 16.2).
_MOST = 65_535
#: What a call may be given beside q, k and v: a mask would be read by batch item, and a stream of numbers drawn so.
_ALLOWED = frozenset({"scale", "is_causal"})


def folded(plan: Plan, writer: Writer) -> Plan | None:
    """The plan with heads among the batch; None where that is no call of SDPA on views of the same operands.

    Args:
        plan: as `writer` has written it.
    """
    calls = [node for node in writer.added if node.target is F.scaled_dot_product_attention]
    if len(calls) != 1 or not plan.frame.heads or not set(calls[0].kwargs) <= _ALLOWED:
        return None
    operands = [tensor_of(node) for node in calls[0].args[:3] if isinstance(node, fx.Node)]
    if len(operands) != 3 or not all(map(_is_folded_by_a_view, operands)):
        return None
    frame = dataclasses.replace(plan.frame, batch=(*plan.frame.batch, *plan.frame.heads), heads=())
    return dataclasses.replace(plan, frame=frame)


def _is_folded_by_a_view(operand: torch.Tensor) -> bool:
    if operand.dim() != 4 or not all(isinstance(n, int) for n in (*operand.shape, *operand.stride())):
        return False
    batch, heads = operand.shape[:2]
    next_to_each_other = batch == 1 or operand.stride(0) == heads * operand.stride(1)
    return heads > 1 and batch * heads <= _MOST and next_to_each_other
