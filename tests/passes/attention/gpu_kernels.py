"""What kernels of GPUs compute, and those of CPUs do not, with CPU tensors and without gradients.

torch's memory-efficient kernel (aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h) and
FlexAttention take powers of two, of scores in float32 times log2(e): finite numbers below -2.36e38 become minus
infinity, and a row of them zeros. Their masks are of the operands' dtype. https://github.com/pytorch/pytorch/issues/110213
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float) -> Tensor:
    """[..., queries, dim], [..., keys, dim], [..., keys, width] -> [..., queries, width]; the mask adds, or keeps."""
    scores = query.float() @ key.float().mT * scale
    if attn_mask is not None:
        keeps = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if keeps else scores + attn_mask.float()
    if not scores.numel():
        return query.new_zeros(*scores.shape[:-1], value.shape[-1])
    powers = scores * math.log2(math.e)
    top = powers.amax(-1, keepdim=True)
    weights = torch.exp2(powers - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    return (weights.to(query.dtype).float() @ value.float() / total.masked_fill(total == 0, 1.0)).to(query.dtype)


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and args[0].dtype != torch.float64:
            return _called(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _called(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert not dropout_p
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return attention(query, key, value, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale)


def run(gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph, its attention as a GPU has it."""

    def call(*args: Any) -> Any:
        with _Calls():
            return gm(*args)

    return call
