"""A vision transformer (Dosovitskiy et al. 2020) in the manner of timm: patches, class token, learned positions.

Attention is written out with one fused projection unbound along a leading dimension and the scale on the query. With
224-pixel images and 16-pixel patches the sequence is 197 tokens, aligned to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass.models.common import default_dtype
from optpass.models.presets import Preset, check_ranges, require, resolve


@dataclass(frozen=True)
class ViTConfig:
    """The model's dimensions; `image` and `patch` are sides in pixels. The default is ViT-B/16 at 224."""

    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    layers: int = 12
    heads: int = 12
    width: int = 768
    ffn: int = 3072
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self)
        require(self.width % self.heads == 0, f"heads ({self.heads}) must divide width ({self.width})")
        require(self.image % self.patch == 0, f"patch ({self.patch}) must divide image ({self.image})")

    @property
    def tokens(self) -> int:
        """Sequence length: the patches and the class token."""
        return int(self.image // self.patch) ** 2 + 1


@dataclass(frozen=True)
class Inputs:
    """Example inputs: images [batch, channels, image, image]."""

    batch: int = 1


SIZES: Mapping[str, Preset[ViTConfig, Inputs]] = {
    "tiny": Preset(ViTConfig(image=32, patch=8, classes=11, layers=2, heads=3, width=33, ffn=67), Inputs(batch=2)),
    "small": Preset(ViTConfig(classes=101, layers=4, heads=6, width=198, ffn=791), Inputs()),
    "base": Preset(ViTConfig(), Inputs(batch=8)),
    "large": Preset(ViTConfig(layers=24, heads=16, width=1024, ffn=4096), Inputs(batch=8)),
}


class Attention(nn.Module):
    """Multi-head attention without a mask: [batch, tokens, width] -> [batch, tokens, width]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads, self.head = config.heads, config.width // config.heads
        self.scale = self.head**-0.5
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attn_drop = nn.Dropout(config.dropout)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, self.head).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        out: Tensor = self.proj(x)
        return out


class Block(nn.Module):
    """Pre-norm attention and a GELU feed-forward, each with its residual."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.fc1 = nn.Linear(config.width, config.ffn)
        self.fc2 = nn.Linear(config.ffn, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        out: Tensor = x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return out


class ViT(nn.Module):
    """Images [batch, channels, image, image] -> class logits [batch, classes], read off the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.tokens, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.classes)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.size(0), -1, -1), x), dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A ViT in training mode and (images,); `overrides` replace fields of ViTConfig and Inputs."""
    config, inputs = resolve("vit", SIZES, size, overrides)
    with default_dtype(dtype):
        images = torch.randn(inputs.batch, config.channels, config.image, config.image)
        return ViT(config), (images,)
