"""A Llama-style decoder (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Attention is written out with `repeat_interleave` of the key and value heads and an additive causal mask made once per
forward; softmax runs in float32, as in Meta's reference code. No dropout, no biases, output head of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass.models.common import default_dtype
from optpass.models.presets import Preset, check_ranges, require, resolve


@dataclass(frozen=True)
class LlamaConfig:
    """The model's dimensions. Each of `heads` query heads is `width / heads` wide; `kv_heads` are shared among them."""

    vocab: int = 128256
    context: int = 8192
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 4096
    ffn: int = 14336
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_ranges(self)
        require(self.width % self.heads == 0, f"heads ({self.heads}) must divide width ({self.width})")
        require(self.heads % self.kv_heads == 0, f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        head = self.width // self.heads
        require(head % 2 == 0, f"rotary positions need an even head width, not {head} (width / heads)")


@dataclass(frozen=True)
class Inputs:
    """Example inputs: tokens [batch, seq]; with `targets`, as many targets, so that the model returns its loss."""

    batch: int = 1
    seq: int = 8192
    targets: bool = False


SIZES: Mapping[str, Preset[LlamaConfig, Inputs]] = {
    "tiny": Preset(
        LlamaConfig(vocab=131, context=32, layers=2, heads=6, kv_heads=2, width=60, ffn=101), Inputs(batch=2, seq=17)
    ),
    "small": Preset(
        LlamaConfig(vocab=2111, context=256, layers=4, heads=6, kv_heads=2, width=204, ffn=545),
        Inputs(batch=2, seq=127),
    ),
    "8b": Preset(LlamaConfig(), Inputs()),
    "70b": Preset(LlamaConfig(layers=80, heads=64, width=8192, ffn=28672), Inputs()),
}


def rotary_table(head: int, context: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/head), each [context, head], float32 (Su et al. 2021, eq. 34)."""
    frequency = theta ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) on the halves of the last dimension."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x [batch, heads, seq, head] by cos, sin [seq, head]; in float32, returned in x's dtype."""
    wide = x.float()
    return (wide * cos + rotate_half(wide) * sin).type_as(x)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): [batch, seq, width] -> [batch, seq, width]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.head, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(config.heads * self.head, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.heads, self.head).transpose(1, 2)
        k = self.wk(x).view(B, T, self.kv_heads, self.head).transpose(1, 2)
        v = self.wv(x).view(B, T, self.kv_heads, self.head).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head)
        scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        y = torch.matmul(scores, v).transpose(1, 2).contiguous().view(B, T, -1)
        out: Tensor = self.wo(y)
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, mask)
        y: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return y


class Llama(nn.Module):
    """Tokens [batch, seq] (int64) -> logits [batch, seq, vocab]; with targets, -> (logits, mean cross-entropy).

    Raises ValueError for a sequence longer than `config.context`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.output = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary_table(config.width // config.heads, config.context, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        length = tokens.size(1)
        if length > self.config.context:
            raise ValueError(f"sequence of {length} tokens is longer than the context of {self.config.context}")
        h = self.tok_embeddings(tokens)
        mask = torch.full((length, length), float("-inf"), device=tokens.device, dtype=h.dtype)
        mask = torch.triu(mask, diagonal=1)
        for block in self.blocks:
            h = block(h, self.cos[:length], self.sin[:length], mask)
        logits: Tensor = self.output(self.norm(h))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A Llama in training mode and (tokens,) or (tokens, targets); `overrides` replace fields of config and Inputs."""
    config, inputs = resolve("llama", SIZES, size, overrides)
    require(inputs.seq <= config.context, f"llama: seq ({inputs.seq}) is longer than context ({config.context})")
    with default_dtype(dtype):
        tokens = torch.randint(config.vocab, (inputs.batch, inputs.seq))
        if not inputs.targets:
            return Llama(config), (tokens,)
        return Llama(config), (tokens, torch.randint(config.vocab, (inputs.batch, inputs.seq)))
