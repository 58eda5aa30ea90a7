"""A click-through model like DLRM (Naumov et al. 2019): embedding bags, two MLPs, pairwise dot products between.

Bound by memory where the others are bound by compute: a few rows of large tables are gathered per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optpass.models.common import default_dtype
from optpass.models.presets import Preset, check_ranges, resolve

# Rows of the 26 tables of MLPerf's DLRM on Criteo 1TB, capped at 40 million (torchrec's `dlrm_main` example).
_CRITEO_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)


@dataclass(frozen=True)
class DLRMConfig:
    """`dense` numbers and one bag of indices per table of `rows`, each row `width` wide; `bottom` and `top` are the
    hidden widths of the MLPs before and after the interaction. The default is MLPerf's Criteo 1TB model."""

    dense: int = 13
    rows: tuple[int, ...] = _CRITEO_ROWS
    width: int = 128
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def pairs(self) -> int:
        """Unordered pairs among the tables' vectors and the dense one."""
        return (len(self.rows) + 1) * len(self.rows) // 2


@dataclass(frozen=True)
class Inputs:
    """Example inputs: numbers [batch, dense] and indices [tables, batch, bag]."""

    batch: int = 8192
    bag: int = 1


SIZES: Mapping[str, Preset[DLRMConfig, Inputs]] = {
    "tiny": Preset(DLRMConfig(dense=5, rows=(101, 37, 3), width=9, bottom=(17,), top=(23, 11)), Inputs(batch=7, bag=2)),
    "small": Preset(
        DLRMConfig(rows=(20_011, 5_003, 1_009, 307, 101, 53, 11, 3), width=65, bottom=(255, 129), top=(509, 257)),
        Inputs(batch=1023, bag=5),
    ),
    "criteo": Preset(DLRMConfig(), Inputs()),
}


def mlp(into: int, hidden: tuple[int, ...], out: int) -> nn.ModuleList:
    """Linear layers through the widths `into`, `hidden`..., `out`."""
    widths = (into, *hidden, out)
    return nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))


class DLRM(nn.Module):
    """Numbers [batch, dense] and indices [tables, batch, bag] (int64) -> click logits [batch]."""

    first: Tensor
    second: Tensor

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, config.width, mode="sum") for rows in config.rows)
        self.bottom = mlp(config.dense, config.bottom, config.width)
        self.top = mlp(config.width + config.pairs, config.top, 1)
        first, second = torch.tril_indices(len(config.rows) + 1, len(config.rows) + 1, offset=-1).unbind(0)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)

    def interact(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        """The dense vector next to the dot products of all pairs of vectors: [batch, width + pairs]."""
        vectors = torch.stack([dense, *sparse], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense, dots[:, self.first, self.second]), dim=1)

    def forward(self, numbers: Tensor, indices: Tensor) -> Tensor:
        x = numbers
        for layer in self.bottom:
            x = F.relu(layer(x))
        x = self.interact(x, [table(indices[i]) for i, table in enumerate(self.tables)])
        for layer in self.top[:-1]:
            x = F.relu(layer(x))
        out: Tensor = self.top[-1](x).squeeze(1)
        return out


def build(
    size: str = "small", *, dtype: torch.dtype = torch.float32, **overrides: object
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A DLRM in training mode and (numbers, indices); `overrides` replace fields of DLRMConfig and Inputs."""
    config, inputs = resolve("dlrm", SIZES, size, overrides)
    with default_dtype(dtype):
        numbers = torch.randn(inputs.batch, config.dense)
        indices = torch.stack([torch.randint(rows, (inputs.batch, inputs.bag)) for rows in config.rows])
        return DLRM(config), (numbers, indices)
