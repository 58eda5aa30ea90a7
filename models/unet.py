"""One level of a diffusion U-Net (Ho et al. 2020; Rombach et al. 2022): down, middle and up, with a skip connection.

Residual convolution blocks with group norm, SiLU and a time embedding; after each, a transformer block over the pixels
with self-attention, cross-attention to a context, and a gated feed-forward. Attention is written out with `einsum` on
heads folded into the batch, as in the latent-diffusion code.
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
class UNetConfig:
    """The model's dimensions: `width` channels on top and twice as many below; the default is the first level of
    Stable Diffusion 1.5. `context_width` is the width of what cross-attention looks at (text)."""

    channels: int = 4
    width: int = 320
    heads: int = 8
    groups: int = 32
    context_width: int = 768
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self)
        require(self.width % self.heads == 0, f"heads ({self.heads}) must divide width ({self.width})")
        require(self.width % self.groups == 0, f"groups ({self.groups}) must divide width ({self.width})")


@dataclass(frozen=True)
class Inputs:
    """Example inputs: latents [batch, channels, image, image], steps [batch], text [batch, context, context_width]."""

    batch: int = 1
    image: int = 64
    context: int = 77

    def __post_init__(self) -> None:
        require(self.image % 2 == 0, f"image ({self.image}) must be even: it is halved and doubled again")


SIZES: Mapping[str, Preset[UNetConfig, Inputs]] = {
    "tiny": Preset(UNetConfig(width=15, heads=3, groups=5, context_width=13), Inputs(batch=2, image=8, context=7)),
    "small": Preset(UNetConfig(width=63, heads=3, groups=9, context_width=129), Inputs(image=22)),
    "sd15": Preset(UNetConfig(), Inputs(batch=2)),
}


def time_embedding(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of the step [batch] at geometric frequencies: [batch, width], float32; zero-padded if odd."""
    half = width // 2
    frequency = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=steps.device) / half)
    angle = steps.float()[:, None] * frequency[None, :]
    return F.pad(torch.cat((angle.cos(), angle.sin()), dim=-1), (0, width - 2 * half))


class ResBlock(nn.Module):
    """Two 3x3 convolutions with the time embedding added between: [b, into, h, w] -> [b, out, h, w]."""

    def __init__(self, config: UNetConfig, into: int, out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, into)
        self.conv1 = nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(4 * config.width, out)
        self.norm2 = nn.GroupNorm(config.groups, out)
        self.dropout = nn.Dropout(config.dropout)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        y: Tensor = self.skip(x) + h
        return y


class CrossAttention(nn.Module):
    """Attention from x [batch, n, width] to context [batch, m, context_width], heads folded into the batch."""

    def __init__(self, width: int, context_width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context_width, width, bias=False)
        self.to_v = nn.Linear(context_width, width, bias=False)
        self.to_out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def _fold(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        return x.reshape(b, n, self.heads, c // self.heads).permute(0, 2, 1, 3).reshape(b * self.heads, n, -1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self._fold(self.to_q(x)), self._fold(self.to_k(context)), self._fold(self.to_v(context))
        sim = torch.einsum("bid,bjd->bij", q, k) * self.scale
        attn = self.dropout(sim.softmax(dim=-1))
        out = torch.einsum("bij,bjd->bid", attn, v)
        out = out.reshape(b, self.heads, n, -1).permute(0, 2, 1, 3).reshape(b, n, c)
        y: Tensor = self.to_out(out)
        return y


class SpatialTransformer(nn.Module):
    """Self-attention over the pixels, cross-attention to the context, GEGLU: [b, c, h, w] -> [b, c, h, w]."""

    def __init__(self, config: UNetConfig, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.groups, width, eps=1e-6)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn1 = CrossAttention(width, width, config.heads, config.dropout)
        self.attn2 = CrossAttention(width, config.context_width, config.heads, config.dropout)
        self.geglu = nn.Linear(width, 8 * width)
        self.out = nn.Linear(4 * width, width)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norm1(y)
        y = y + self.attn1(normed, normed)
        y = y + self.attn2(self.norm2(y), context)
        value, gate = self.geglu(self.norm3(y)).chunk(2, dim=-1)
        y = y + self.out(value * F.gelu(gate))
        y = y.transpose(1, 2).reshape(b, c, h, w)
        out: Tensor = x + self.proj_out(y)
        return out


class UNet(nn.Module):
    """Noisy latents [b, channels, h, w], steps [b] (int64), context [b, m, context_width] -> [b, channels, h, w]."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        top, low = config.width, 2 * config.width
        self.time_in, self.time_out = nn.Linear(top, 4 * top), nn.Linear(4 * top, 4 * top)
        self.conv_in = nn.Conv2d(config.channels, top, 3, padding=1)
        self.down_res, self.down_attn = ResBlock(config, top, top), SpatialTransformer(config, top)
        self.downsample = nn.Conv2d(top, top, 3, stride=2, padding=1)
        self.mid_res, self.mid_attn = ResBlock(config, top, low), SpatialTransformer(config, low)
        self.mid_out = ResBlock(config, low, low)
        self.upsample = nn.Conv2d(low, low, 3, padding=1)
        self.up_res, self.up_attn = ResBlock(config, low + top, top), SpatialTransformer(config, top)
        self.norm_out = nn.GroupNorm(config.groups, top)
        self.conv_out = nn.Conv2d(top, config.channels, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor, context: Tensor) -> Tensor:
        time = time_embedding(steps, self.config.width).to(x.dtype)
        time = self.time_out(F.silu(self.time_in(time)))
        h = self.conv_in(x)
        h = skip = self.down_attn(self.down_res(h, time), context)
        h = self.downsample(h)
        h = self.mid_attn(self.mid_res(h, time), context)
        h = self.mid_out(h, time)
        h = self.upsample(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.up_res(torch.cat((h, skip), dim=1), time)
        h = self.up_attn(h, context)
        out: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return out


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A UNet in training mode and (latents, steps, context); `overrides` replace fields of UNetConfig and Inputs."""
    config, inputs = resolve("unet", SIZES, size, overrides)
    with default_dtype(dtype):
        latents = torch.randn(inputs.batch, config.channels, inputs.image, inputs.image)
        steps = torch.randint(1000, (inputs.batch,))
        context = torch.randn(inputs.batch, inputs.context, config.context_width)
        return UNet(config), (latents, steps, context)
