"""A chain of linear layers of one odd width, each followed by GELU: nothing but matmuls that miss every alignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass.models.common import default_dtype
from optpass.models.presets import Preset, check_ranges, resolve


@dataclass(frozen=True)
class MLPConfig:
    """`layers` linear layers, `width` in and out."""

    layers: int = 16
    width: int = 1001

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Inputs:
    """Example inputs: rows [batch, width]."""

    batch: int = 4096


SIZES: Mapping[str, Preset[MLPConfig, Inputs]] = {
    "tiny": Preset(MLPConfig(layers=3, width=33), Inputs(batch=5)),
    "small": Preset(MLPConfig(layers=6), Inputs(batch=65)),
    "base": Preset(MLPConfig(), Inputs()),
    "large": Preset(MLPConfig(layers=16, width=8191), Inputs()),
}


class MLP(nn.Module):
    """[batch, width] -> [batch, width]; GELU between the layers, none after the last."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        out: Tensor = self.layers[-1](x)
        return out


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """An MLP in training mode and (rows,); `overrides` replace fields of MLPConfig and Inputs."""
    config, inputs = resolve("mlp", SIZES, size, overrides)
    with default_dtype(dtype):
        return MLP(config), (torch.randn(inputs.batch, config.width),)
