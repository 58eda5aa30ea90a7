"""Attention with dropout that is planned for a GPU holds and computes what a GPU's kernels do, not a CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import optpass
from optpass.passes.attention import elsewhere

LENGTH = 128
SCORES = f"2, {LENGTH}, {LENGTH}]"  # of two heads


class Attention(nn.Module):
    """SDPA by hand, as `how` says, with dropout `p`."""

    def __init__(self, how: str, p: float) -> None:
        super().__init__()
        self.how, self.p = how, p
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.how == "mask":
            y = F.scaled_dot_product_attention(q, k, v, self.mask, self.p)
        elif self.how == "bias":
            y = F.scaled_dot_product_attention(q, k, v, self.mask.to(x.dtype)[None], dropout_p=self.p, scale=0.5)
        elif self.how == "checkpoint":
            y = checkpoint(self.dropped, q, k, v, use_reentrant=False)
        else:
            y = self.dropped(q, k, v)
        found: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found

    def dropped(self, *operands: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*operands, dropout_p=self.p, is_causal=True)


def model(how: str, p: float) -> nn.Module:
    if how == "encoder":
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
        layer.self_attn.dropout = p
        return layer
    return Attention(how, p)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("how", ["causal", "mask", "bias", "checkpoint", "encoder"])
def test_a_plan_holds_no_scores(how: str, dtype: torch.dtype) -> None:
    inputs = torch.randn(4, LENGTH, 64, dtype=dtype)
    plans = [optpass.plan(model(how, p).to(dtype), inputs, device="h200", loss=torch.Tensor.sum) for p in (0.1, 0.0)]
    dropped, kept = (plan.predicted_peak_bytes for plan in plans)
    assert dropped < 1.1 * kept
    made = {tensor.shape for tensor in plans[0].saved} - {tensor.shape for tensor in plans[1].saved}
    assert not [shape for shape in made if shape.endswith(SCORES)]


def test_an_analysis_computes_no_scores() -> None:
    inputs = torch.randn(4, LENGTH, 64)
    found = [optpass.analyze(model("causal", p), inputs, device="h200", train=True).totals for p in (0.1, 0.0)]
    assert found[0].flops == found[1].flops and found[0].bytes_fused < 1.01 * found[1].bytes_fused


@pytest.mark.slow
def test_what_no_kernel_of_a_gpu_computes_is_left() -> None:
    """Heads that are shared, in float32; and a plan for the CPU itself, whose kernel drops nothing."""
    inputs = torch.randn(4, LENGTH, 64)
    here = optpass.plan(model("causal", 0.1), inputs, device="cpu", loss=torch.Tensor.sum)
    assert [tensor for tensor in here.saved if tensor.shape.endswith(SCORES)]

    def dropped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, dropout_p=0.1, enable_gqa=True)

    gm = torch.fx.symbolic_trace(dropped)
    elsewhere.as_on_a_gpu(gm)
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    assert gm(q, k).shape == q.shape  # numbers, which another thread may have: torch's own
    assert F.scaled_dot_product_attention is not elsewhere.attention
