"""Causal masks kept in a buffer (or a plain attribute) of the module and cut to the length at run time."""

from __future__ import annotations

import torch
from attention_forms.base import Sizes
from attention_forms.mask_base import Masked, buffer_idiom
from torch import Tensor

INF = float("-inf")


@buffer_idiom("causal")
class SlicedAndComparedWithZero(Masked):
    def made(self, size: int) -> Tensor:
        return torch.tril(torch.ones(size, size)).view(1, 1, size, size)

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias[:, :, :n, :n] == 0, INF)


@buffer_idiom("causal")
class SlicedByKeysAndQueries(Masked):
    def made(self, size: int) -> Tensor:
        return torch.tril(torch.ones(size, size, dtype=torch.bool)).view(1, 1, size, size)

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        minimum = torch.finfo(scores.dtype).min
        return torch.where(self.bias[:, :, m - n : m, :m], scores, torch.tensor(minimum, dtype=scores.dtype))


@buffer_idiom("causal")
class DividedByANumberThatIsHeld(Masked):
    """GPT-J: a `where`, and behind it a division by a tensor of no dims."""

    def made(self, size: int) -> Tensor:
        self.scale_attn = torch.sqrt(torch.tensor(2.0))
        return torch.tril(torch.ones(size, size, dtype=torch.bool)).view(1, 1, size, size)

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        scores = torch.where(self.bias[:, :, m - n : m, :m], scores, torch.tensor(-1e9, dtype=scores.dtype))
        return scores / self.scale_attn


@buffer_idiom("causal")
class SlicedBytes(Masked):
    def made(self, size: int) -> Tensor:
        return torch.ones(size, size, dtype=torch.uint8).tril()

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.size(-1)
        return scores.masked_fill(self.bias[:n, :n].logical_not(), INF)


@buffer_idiom("causal")
class SlicedAndAdded(Masked):
    def made(self, size: int) -> Tensor:
        return torch.full((size, size), INF).triu(1)

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.bias[: scores.shape[-2], : scores.shape[-1]]


@buffer_idiom("causal")
class SlicedNegatedFilledInPlace(Masked):
    """Raschka: `mask.bool()[:n, :n]` of a triu, filled in place."""

    def made(self, size: int) -> Tensor:
        return torch.triu(torch.ones(size, size), diagonal=1)

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        scores.masked_fill_(self.bias.bool()[:n, :n], -torch.inf)
        return scores


@buffer_idiom("causal")
class MinGPT(Masked):
    """Half a line further: the buffer is narrowed, and compared as an integer."""

    def made(self, size: int) -> Tensor:
        return torch.tril(torch.ones(size, size, dtype=torch.long))[None, None]

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.bias.narrow(2, 0, n).narrow(3, 0, n) < 1, INF)


@buffer_idiom("causal")
class EverySecondPosition(Masked):
    """Strides of two along both axes keep a causal mask causal."""

    def made(self, size: int) -> Tensor:
        return torch.ones(size, size, dtype=torch.bool).tril()

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(~self.bias[: 2 * n : 2, : 2 * n : 2], INF)


@buffer_idiom("free")
class NotABuffer(Masked):
    """A tensor that hangs on the module as a plain attribute; with dynamic shapes its own size is unknown too."""

    def __init__(self, s: Sizes) -> None:
        super().__init__(s)
        self.tril = torch.ones(64, 64).tril()

    def made(self, size: int) -> Tensor:
        return torch.zeros(1)

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(self.tril[:n, :n] == 0, INF)
