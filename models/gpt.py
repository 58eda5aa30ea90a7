"""A decoder-only transformer in the manner of nanoGPT (Karpathy) and GPT-2 (Radford et al. 2019).

Learned positions, pre-norm blocks, GELU, dropout, and an output head that shares the embedding's weight. Attention is
written out with a lower-triangular buffer per layer and `masked_fill`. `optpass train` trains this model.
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
class GPTConfig:
    """The model's dimensions. `width` is the residual stream's; each head is `width / heads` wide."""

    vocab: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(self)
        require(self.width % self.heads == 0, f"heads ({self.heads}) must divide width ({self.width})")


@dataclass(frozen=True)
class Inputs:
    """Example inputs: tokens [batch, seq]; with `targets`, as many targets, so that the model returns its loss."""

    batch: int = 1
    seq: int = 1024
    targets: bool = False


SIZES: Mapping[str, Preset[GPTConfig, Inputs]] = {
    "tiny": Preset(GPTConfig(vocab=131, context=32, layers=2, heads=3, width=33), Inputs(batch=2, seq=17)),
    "small": Preset(GPTConfig(vocab=2111, context=256, layers=4, heads=6, width=198), Inputs(batch=2, seq=128)),
    "gpt2": Preset(GPTConfig(), Inputs(batch=4, seq=1024)),
    "gpt2-xl": Preset(GPTConfig(layers=48, heads=25, width=1600), Inputs(batch=1, seq=1024)),
}


class CausalSelfAttention(nn.Module):
    """Multi-head attention over past and present tokens: [batch, seq, width] -> [batch, seq, width]."""

    mask: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        tril = torch.tril(torch.ones(config.context, config.context))
        self.register_buffer("mask", tril.view(1, 1, config.context, config.context), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class MLP(nn.Module):
    """Linear to four times the width, GELU, and back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x))
        out: Tensor = self.dropout(self.c_proj(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Tokens [batch, seq] (int64) -> logits [batch, seq, vocab]; with targets, -> (logits, mean cross-entropy).

    Targets of -1 are ignored. Raises ValueError for a sequence longer than `config.context`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            # GPT-2: the projections into the residual stream start smaller, the deeper the model.
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        length = idx.size(1)
        if length > self.config.context:
            raise ValueError(f"sequence of {length} tokens is longer than the context of {self.config.context}")
        pos = torch.arange(length, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A GPT in training mode and (tokens,) or (tokens, targets); `overrides` replace fields of GPTConfig and Inputs."""
    config, inputs = resolve("gpt", SIZES, size, overrides)
    require(inputs.seq <= config.context, f"gpt: seq ({inputs.seq}) is longer than context ({config.context})")
    with default_dtype(dtype):
        tokens = torch.randint(config.vocab, (inputs.batch, inputs.seq))
        if not inputs.targets:
            return GPT(config), (tokens,)
        return GPT(config), (tokens, torch.randint(config.vocab, (inputs.batch, inputs.seq)))
