"""The Llama that `memory_cuda` trains, as the compared ways have it: attention written out, or SDPA by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass import models
from optpass.models.llama import Attention, Llama, apply_rotary


class ByHandAttention(Attention):
    """`models.llama`'s attention with SDPA written in by hand."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.head).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))
        return out


class Loss(nn.Module):
    """A Llama that gives its loss alone, so that no way holds the logits for its caller."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        _, loss = self.model(*inputs)
        assert isinstance(loss, Tensor)
        return loss


def build(overrides: Mapping[str, Any], *, device: str, by_hand: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model in bfloat16, in training mode, with its inputs. The weights are torch's next random numbers."""
    with torch.device(device):
        module, inputs = models.build("llama", "8b", dtype=torch.bfloat16, **overrides)
    assert isinstance(module, Llama)
    if by_hand:
        for block in module.blocks:
            block.attention.__class__ = ByHandAttention
    return Loss(module), inputs
