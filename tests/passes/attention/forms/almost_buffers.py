"""Buffers that look like causal masks, or are, and are cut so that what is left is not."""

from __future__ import annotations

from typing import Any

import torch
from attention_forms.base import crossed, heads_first
from attention_forms.mask_base import Masked, buffer_idiom
from torch import Tensor

INF = float("-inf")


def _almost(inputs: Any = heads_first) -> Any:
    return buffer_idiom("operand", inputs, target="either", train="either", group="almost")


class _Causal(Masked):
    def made(self, size: int) -> Tensor:
        return torch.ones(size, size).tril()


@_almost()
class SliceFurtherDown(_Causal):
    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[1 : n + 1, :n] == 0, INF)


@_almost()
class SliceFurtherRight(_Causal):
    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[:n, 1 : n + 1] == 0, torch.finfo(scores.dtype).min)


@_almost()
class SliceWithAStride(_Causal):
    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[: 2 * n : 2, :n] == 0, INF)


@_almost(crossed)
class SliceOfKeysAndQueries(_Causal):
    """The slice of GPT-2 with a cache: rows m - n to m."""

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        return scores.masked_fill(self.bias[m - n : m, :m] == 0, INF)


@_almost()
class OneElementOff(_Causal):
    def made(self, size: int) -> Tensor:
        bias = super().made(size)
        bias[2, 11] = 1
        return bias

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[:n, :n] == 0, INF)


@_almost()
class OneElementSmall(_Causal):
    """Not 0 and not 1: compared with 0 it is allowed."""

    def made(self, size: int) -> Tensor:
        bias = super().made(size)
        bias[2, 11] = 1e-30
        return bias

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[:n, :n] == 0, INF)


@_almost()
class OneElementFinite(Masked):
    """An additive mask with one -1 among the minus infinities."""

    def made(self, size: int) -> Tensor:
        bias = torch.full((size, size), INF).triu(1)
        bias[0, 1] = -1.0
        return bias

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.bias[: scores.shape[-2], : scores.shape[-1]]


@_almost()
class OneElementBelow(Masked):
    """An additive mask with 0.5 below the diagonal."""

    def made(self, size: int) -> Tensor:
        bias = torch.full((size, size), INF).triu(1)
        bias[4, 2] = 0.5
        return bias

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.bias[: scores.shape[-2], : scores.shape[-1]]
