"""Attention as people write it and as SDPA computes it, with inputs of given sizes: what the attention benchmarks time.

Nothing is measured and no claim is known here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass import models
from optpass.bench.clocks import Call
from optpass.models.gpt import GPT, CausalSelfAttention

#: Tokens of a batch and width of all heads: constant over a sweep, as in Dao, FlashAttention-2, section 4.1.
OP_SIZES: Mapping[str, tuple[int, int]] = {"cpu": (2048, 512), "cuda": (16384, 2048)}
#: Sizes that a processor runs in seconds a step, and those of GPT-2 for a GPU.
GPT_SIZES: Mapping[str, Mapping[str, int]] = {
    "cpu": {"vocab": 2048, "layers": 4, "heads": 8, "width": 512, "batch": 1},
    "cuda": {"vocab": 50304, "layers": 12, "heads": 12, "width": 768, "batch": 8},
}


class Handwritten(nn.Module):
    """Products and softmax written out, as in nanoGPT: q, k, v [batch, heads, length, dim] -> the same shape."""

    mask: Tensor

    def __init__(self, length: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        tril = torch.tril(torch.ones(length, length)) if causal else torch.ones(1, 1)
        self.register_buffer("mask", tril.view(1, 1, *tril.shape), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.size(-2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if self.causal:
            att = att.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        return F.softmax(att, dim=-1) @ v


class ByHand(nn.Module):
    """The same by SDPA."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class ByHandSelfAttention(CausalSelfAttention):
    """`models.gpt`'s attention with SDPA written in by hand."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        dropped = self.attn_dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        out: Tensor = self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width)))
        return out


@dataclass(frozen=True)
class OpCell:
    """One attention op: sizes, dtype ('float32', ...), and whether a backward is run."""

    dtype: str
    length: int
    training: bool
    causal: bool
    head_dim: int
    device: str

    @property
    def name(self) -> str:
        """E.g. 'float32 training causal S=1024 hd=64'."""
        mode, mask = "training" if self.training else "forward", "causal" if self.causal else "full"
        return f"{self.dtype} {mode} {mask} S={self.length} hd={self.head_dim}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, length, head dim)."""
        tokens, width = OP_SIZES[self.device]
        return max(1, tokens // self.length), max(1, width // self.head_dim), self.length, self.head_dim


def op_call(cell: OpCell, module: nn.Module, compiler: dict[str, Any] | None, seed: int) -> Call:
    """One call of the op (with its backward in training), compiled by `torch.compile(**compiler)` unless None."""
    torch.manual_seed(seed)
    dtype = getattr(torch, cell.dtype)
    q, k, v = (torch.randn(cell.shape, dtype=dtype, device=cell.device, requires_grad=cell.training) for _ in range(3))
    gradient = torch.randn(cell.shape, dtype=dtype, device=cell.device)
    module = module.to(cell.device)
    run: Callable[..., Tensor] = module if compiler is None else torch.compile(module, dynamic=False, **compiler)
    if cell.training:
        return lambda: torch.autograd.grad(run(q, k, v), (q, k, v), gradient)
    return _without_grad(lambda: run(q, k, v))


@dataclass(frozen=True)
class GPTCell:
    """The GPT of `models` at one length."""

    length: int
    training: bool
    device: str

    @property
    def name(self) -> str:
        """E.g. 'gpt training T=1024'."""
        return f"gpt {'training' if self.training else 'inference'} T={self.length}"

    def build(self, seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
        """The model and its inputs, without dropout: its random stream is not what is compared."""
        torch.manual_seed(seed)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        sizes: dict[str, Any] = {**GPT_SIZES[self.device], "context": self.length, "seq": self.length}
        model, inputs = models.build("gpt", "small", dtype=dtype, dropout=0.0, **sizes)
        return model.to(self.device).train(self.training), tuple(t.to(self.device) for t in inputs)


def gpt_call(cell: GPTCell, model: nn.Module, inputs: tuple[Any, ...], compiler: dict[str, Any] | None) -> Call:
    """One inference, or one forward, loss and backward."""
    run: Callable[..., Any] = model if compiler is None else torch.compile(model, dynamic=False, **compiler)
    if not cell.training:
        return _without_grad(lambda: run(*inputs))

    def step() -> None:
        models.loss(run(*inputs)).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.grad = None

    return step


def by_hand(model: nn.Module) -> nn.Module:
    """A copy of a GPT of `models`, same weights, with SDPA written into its attention."""
    written = copy.deepcopy(model)
    assert isinstance(written, GPT)
    for block in written.blocks:
        block.attn.__class__ = ByHandSelfAttention
    return written


def _without_grad(call: Call) -> Call:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run
