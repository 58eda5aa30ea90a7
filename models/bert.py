"""A BERT encoder (Devlin et al. 2018) with its masked-language-model head.

Post-norm blocks, learned positions, token types, and attention written out with the additive padding mask
`(1 - mask) * finfo.min`. The head shares the embedding's weight; there is no pooler.
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
class BertConfig:
    """The model's dimensions; the default is bert-base-uncased."""

    vocab: int = 30522
    context: int = 512
    types: int = 2
    layers: int = 12
    heads: int = 12
    width: int = 768
    ffn: int = 3072
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(self)
        require(self.width % self.heads == 0, f"heads ({self.heads}) must divide width ({self.width})")


@dataclass(frozen=True)
class Inputs:
    """Example inputs: tokens, padding mask and token types, each [batch, seq]; with `targets`, labels too."""

    batch: int = 1
    seq: int = 512
    targets: bool = False


SIZES: Mapping[str, Preset[BertConfig, Inputs]] = {
    "tiny": Preset(BertConfig(vocab=131, context=32, layers=2, heads=3, width=33, ffn=67), Inputs(batch=2, seq=17)),
    "small": Preset(
        BertConfig(vocab=2111, context=256, layers=4, heads=6, width=198, ffn=791), Inputs(batch=2, seq=125)
    ),
    "base": Preset(BertConfig(), Inputs(batch=8)),
    "large": Preset(BertConfig(layers=24, heads=16, width=1024, ffn=4096), Inputs(batch=4)),
}


class Embeddings(nn.Module):
    """Word, position and type embeddings, summed and normalised: [batch, seq] -> [batch, seq, width]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.token_type = nn.Embedding(config.types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        position = torch.arange(ids.size(1), device=ids.device).unsqueeze(0)
        x = self.word(ids) + self.token_type(types) + self.position(position)
        out: Tensor = self.dropout(self.norm(x))
        return out


class SelfAttention(nn.Module):
    """Multi-head attention with an additive mask [batch, 1, 1, seq]; separate query, key and value projections."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.head = config.heads, config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, self.head).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.head)
        scores = scores + mask
        probs = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        y: Tensor = self.output(context.view(x.size(0), x.size(1), -1))
        return y


class Layer(nn.Module):
    """Attention and a GELU feed-forward, each followed by dropout, the residual and a LayerNorm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.intermediate = nn.Linear(config.width, config.ffn)
        self.output = nn.Linear(config.ffn, config.width)
        self.output_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        h = self.output(F.gelu(self.intermediate(x)))
        out: Tensor = self.output_norm(x + self.dropout(h))
        return out


class MaskedLanguageHead(nn.Module):
    """Dense, GELU, LayerNorm, then the embedding's own weight: [batch, seq, width] -> [batch, seq, vocab]."""

    def __init__(self, config: BertConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.decoder = nn.Linear(config.width, config.vocab)
        self.decoder.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.norm(F.gelu(self.transform(x))))
        return y


class Bert(nn.Module):
    """Tokens, mask (1 where there is a token, 0 where padding) and types, each [batch, seq] int64 -> logits
    [batch, seq, vocab]; with labels (-100 is ignored), -> (logits, mean cross-entropy)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = MaskedLanguageHead(config, self.embeddings.word)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self, ids: Tensor, attention_mask: Tensor, token_types: Tensor, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embeddings(ids, token_types)
        mask = attention_mask[:, None, None, :].to(x.dtype)
        mask = (1.0 - mask) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(x)
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A Bert in training mode and (tokens, mask, types) or (tokens, mask, types, labels): rows of unequal length, the
    second half of each row of the last type; `overrides` replace fields of BertConfig and Inputs."""
    config, inputs = resolve("bert", SIZES, size, overrides)
    require(inputs.seq <= config.context, f"bert: seq ({inputs.seq}) is longer than context ({config.context})")
    shape = (inputs.batch, inputs.seq)
    with default_dtype(dtype):
        position = torch.arange(inputs.seq).expand(shape)
        length = torch.randint(max(1, inputs.seq // 2), inputs.seq + 1, (inputs.batch, 1))
        types = (position >= inputs.seq // 2).long() * (config.types - 1)
        example = (torch.randint(config.vocab, shape), (position < length).long(), types)
        if not inputs.targets:
            return Bert(config), example
        return Bert(config), (*example, torch.randint(config.vocab, shape))
