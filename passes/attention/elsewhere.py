"""Calls of SDPA with dropout that are planned for a GPU, on tensors of the host that stand for its own.

Torch chooses the kernel by where tensors are. On a CPU its fused kernel drops nothing, so that attention with dropout
would be taken apart there into all its scores, which no GPU makes. The operators of the GPU's kernels are called
instead; fake tensors of any device go through them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

_SDPA = F.scaled_dot_product_attention
_HALF = (torch.float16, torch.bfloat16)
#: Of tensors that hold numbers, which another thread may call with.
_REAL = (Tensor, nn.Parameter)


def as_on_a_gpu(gm: fx.GraphModule) -> None:
    """Have SDPA with dropout traced as on a GPU, in `gm` and in the graphs that it calls, in place.

    For a graph that is only traced: the operators do not run on a CPU.
    """
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            calls = [n for n in part.graph.nodes if n.op == "call_function" and n.target in _INSTEAD]
            for node in calls:
                node.target = _INSTEAD[node.target]
            if calls:
                part.recompile()


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention`, traced as on a GPU where it drops.

    By the rules of torch's sdp_utils.cpp (2.11 to 2.15): FlashAttention for half precision without a mask, else the
    memory-efficient kernel; neither where heads are shared in float32, or operands are not [batch, heads, length, dim].
    """
    shared = query.shape[-3] != key.shape[-3] if query.dim() == 4 else False
    flash = query.dtype in _HALF and attn_mask is None and key.shape[-1] == value.shape[-1]
    fused = query.dtype in (*_HALF, torch.float32) and query.dim() == 4 and (flash or not shared)
    found: Tensor
    if not dropout_p or query.device.type != "cpu" or not fused or type(query) in _REAL:
        found = _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    elif flash:
        found = torch.ops.aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    else:
        found = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            query, key, value, _added(attn_mask, query, key), True, dropout_p, is_causal, scale=scale
        )[0]
    return found


def _added(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as the memory-efficient kernel takes it: added to the scores, one for each."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    return None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """Torch's function, which Dynamo leaves whole. It hands itself to modes first, which do not see what it calls."""
    with patch.object(F, "scaled_dot_product_attention", attention):
        return F.multi_head_attention_forward(*args, **kwargs)


_INSTEAD: dict[Any, Any] = {_SDPA: attention, F.multi_head_attention_forward: _multi_head}
