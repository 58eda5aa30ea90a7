"""A T5 encoder-decoder (Raffel et al. 2019): RMSNorm, bucketed relative-position bias, unscaled attention.

Attention is written out; the bias is computed once per stack and carries the mask (padding in the encoder, causal in
the decoder) with it. Cross-attention has a padding mask and no position bias. One embedding serves encoder, decoder
and head.
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
class T5Config:
    """The model's dimensions; `head` is each head's width, free of `width / heads`. The default is t5-base.

    Distances fall into `buckets`: half of them exact, the rest logarithmic up to `max_distance`.
    """

    vocab: int = 32128
    layers: int = 12
    heads: int = 12
    head: int = 64
    width: int = 768
    ffn: int = 3072
    buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_ranges(self)
        require(self.buckets % 4 == 0, f"buckets ({self.buckets}) must be a multiple of 4: two signs, two halves")
        require(
            self.max_distance > self.buckets // 2,
            f"max_distance ({self.max_distance}) must exceed half of buckets ({self.buckets})",
        )


@dataclass(frozen=True)
class Inputs:
    """Example inputs: source tokens and mask [batch, seq], target tokens [batch, target_seq]; `targets` adds labels."""

    batch: int = 1
    seq: int = 512
    target_seq: int = 128
    targets: bool = False


SIZES: Mapping[str, Preset[T5Config, Inputs]] = {
    "tiny": Preset(
        T5Config(vocab=131, layers=2, heads=3, head=11, width=35, ffn=67, buckets=8, max_distance=16),
        Inputs(batch=2, seq=17, target_seq=9),
    ),
    "small": Preset(
        T5Config(vocab=2111, layers=3, heads=6, head=33, width=197, ffn=791),
        Inputs(batch=2, seq=125, target_seq=61),
    ),
    "base": Preset(T5Config(), Inputs(batch=4)),
    "large": Preset(T5Config(layers=24, heads=16, width=1024, ffn=4096), Inputs(batch=4)),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in float32."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps)).type_as(x)


class RelativeBias(nn.Module):
    """A learned bias per head and distance bucket: (query length, key length) -> [1, heads, queries, keys]."""

    def __init__(self, config: T5Config, bidirectional: bool) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.buckets, self.max_distance = config.buckets, config.max_distance
        self.table = nn.Embedding(config.buckets, config.heads)

    def bucket(self, distance: Tensor) -> Tensor:
        """Key position minus query position -> bucket index, as in the T5 code release."""
        buckets = self.buckets
        if self.bidirectional:
            buckets //= 2
            side = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            side = torch.zeros_like(distance)
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        # clamp: the logarithm of distance 0 is not used, yet its cast to an integer is undefined.
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return side + torch.where(distance < exact, distance, far)

    def forward(self, queries: int, keys: int) -> Tensor:
        device = self.table.weight.device
        distance = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
        bias: Tensor = self.table(self.bucket(distance)).permute(2, 0, 1).unsqueeze(0)
        return bias


class Attention(nn.Module):
    """Attention from x [batch, queries, width] to source [batch, keys, width], with an additive bias and no scale."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.heads, self.head = config.heads, config.head
        inner = config.heads * config.head
        self.q = nn.Linear(config.width, inner, bias=False)
        self.k = nn.Linear(config.width, inner, bias=False)
        self.v = nn.Linear(config.width, inner, bias=False)
        self.o = nn.Linear(inner, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        # No scale in forward: T5 folds 1 / sqrt(head) into the query's initialisation.
        nn.init.normal_(self.q.weight, std=(config.width * config.head) ** -0.5)
        nn.init.normal_(self.k.weight, std=config.width**-0.5)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1, self.heads, self.head).transpose(1, 2)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self._split(self.q(x)), self._split(self.k(source)), self._split(self.v(source))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = scores + bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        weights = self.dropout(weights)
        y = torch.matmul(weights, v).transpose(1, 2).contiguous().view(x.size(0), -1, self.heads * self.head)
        out: Tensor = self.o(y)
        return out


class FeedForward(nn.Module):
    """Linear, ReLU, dropout, linear; no biases."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.wi = nn.Linear(config.width, config.ffn, bias=False)
        self.wo = nn.Linear(config.ffn, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(self.dropout(F.relu(self.wi(x))))
        return y


class Block(nn.Module):
    """Pre-norm self-attention, cross-attention (decoder only) and feed-forward, each with dropout and its residual."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.self_norm, self.self_attention = RMSNorm(config), Attention(config)
        self.decoder = decoder
        if decoder:
            self.cross_norm, self.cross_attention = RMSNorm(config), Attention(config)
        self.ffn_norm, self.feed_forward = RMSNorm(config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, bias: Tensor, memory: Tensor | None = None, memory_bias: Tensor | None = None
    ) -> Tensor:
        h = self.self_norm(x)
        x = x + self.dropout(self.self_attention(h, h, bias))
        if self.decoder:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_bias))
        out: Tensor = x + self.dropout(self.feed_forward(self.ffn_norm(x)))
        return out


class Encoder(nn.Module):
    """Blocks over the source; position bias and padding mask are added up once."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.relative_bias = RelativeBias(config, bidirectional=True)
        self.blocks = nn.ModuleList(Block(config, decoder=False) for _ in range(config.layers))
        self.final_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        bias = self.relative_bias(x.size(1), x.size(1)) + padding
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, bias)
        out: Tensor = self.dropout(self.final_norm(x))
        return out


class Decoder(nn.Module):
    """Causal blocks over the target, each looking at the encoder's output under the source's padding mask."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.relative_bias = RelativeBias(config, bidirectional=False)
        self.blocks = nn.ModuleList(Block(config, decoder=True) for _ in range(config.layers))
        self.final_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        T = x.size(1)
        position = torch.arange(T, device=x.device)
        causal = (position[None, :] > position[:, None]).to(x.dtype) * torch.finfo(x.dtype).min
        bias = self.relative_bias(T, T) + causal
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, bias, memory, padding)
        out: Tensor = self.dropout(self.final_norm(x))
        return out


class T5(nn.Module):
    """Source tokens and mask [batch, seq], target tokens [batch, target_seq], all int64 -> logits
    [batch, target_seq, vocab]; with labels (-100 is ignored), -> (logits, mean cross-entropy)."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab, config.width)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        self.lm_head.weight = self.shared.weight
        nn.init.normal_(self.shared.weight)

    def forward(
        self, ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = self.shared(ids)
        padding = attention_mask[:, None, None, :].to(x.dtype)
        padding = (1.0 - padding) * torch.finfo(x.dtype).min
        memory = self.encoder(x, padding)
        y = self.decoder(self.shared(decoder_ids), memory, padding)
        # Embedding and head share one weight of deviation 1, so the logits are scaled down instead.
        logits: Tensor = self.lm_head(y * self.config.width**-0.5)
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A T5 in training mode and (source, mask, target) or (source, mask, target, labels), with sources of unequal
    length; `overrides` replace fields of T5Config and Inputs."""
    config, inputs = resolve("t5", SIZES, size, overrides)
    target_shape = (inputs.batch, inputs.target_seq)
    with default_dtype(dtype):
        source = torch.randint(config.vocab, (inputs.batch, inputs.seq))
        length = torch.randint(max(1, inputs.seq // 2), inputs.seq + 1, (inputs.batch, 1))
        mask = (torch.arange(inputs.seq)[None, :] < length).long()
        example = (source, mask, torch.randint(config.vocab, target_shape))
        if not inputs.targets:
            return T5(config), example
        return T5(config), (*example, torch.randint(config.vocab, target_shape))
