"""Batched products for attention in blocks, by the library that multiplies faster on the processor at hand.

PyTorch hands float32 products on a CPU to its BLAS. That is MKL on x86, whose AVX-512 code runs on Intel's processors
only: on others with AVX-512 oneDNN, which PyTorch carries for other dtypes, is more than twice as fast. What a block
holds and when it is computed is `blocks`' business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from optpass.passes.processor import slow_library

#: Scores of a head from which a call for each head pays: 128 x 128 are slower by 1.3, 256 x 256 faster by 1.2.
_SCORES_OF_A_CALL: Final = 1 << 15
#: Rows of two operands from which leftᵀ right is made faster as (rightᵀ left)ᵀ: 512 take two thirds of the time, 128
#: are slower by 1.1.
_SHORT: Final = 192


class Products(Protocol):
    """How a block's products are computed, and the sizes of blocks that suit it.

    Attributes:
        scores: of a block for each thread.
        least_rows: queries of a block.
        causal_rows: queries of a causal block at most: fewer compute less in vain beside the diagonal, more make larger
            products.
        one_head: blocks of a single head suit it best.
        writes: it writes to memory that it is given.
    """

    @property
    def scores(self) -> int: ...
    @property
    def least_rows(self) -> int: ...
    @property
    def causal_rows(self) -> int: ...
    @property
    def one_head(self) -> bool: ...
    @property
    def writes(self) -> bool: ...

    def laid_out(self, operand: Tensor) -> Tensor:
        """An operand [heads, rows, columns] of which slices are multiplied many times, as that is done the fastest."""

    def matmul(self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """scale · left right: [heads, m, k], [heads, k, n] -> [heads, m, n], in the memory of `out` if it `writes`."""

    def transposed(
        self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0, *, onto: bool = False
    ) -> Tensor:
        """scale · leftᵀ right: [heads, k, m], [heads, k, n] -> [heads, m, n], where `left` is the larger.

        Args:
            onto: added to what `out` holds, if it `writes`.
        """


@dataclass(frozen=True)
class Library:
    """PyTorch's own products. A block's scores and weights have 4 MiB in bfloat16, a core's part of its caches."""

    scores: int = 1 << 20
    least_rows: int = 16
    causal_rows: int = 256
    one_head: bool = False
    writes: bool = True

    def laid_out(self, operand: Tensor) -> Tensor:
        return operand

    def matmul(self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if out is None:
            out = left.new_empty((left.shape[0], left.shape[1], right.shape[2]))
        if scale == 1.0:
            return torch.bmm(left, right, out=out)
        return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)

    def transposed(
        self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0, *, onto: bool = False
    ) -> Tensor:
        if onto and out is not None:
            return torch.baddbmm(out, left.transpose(1, 2), right, beta=1, alpha=scale, out=out)
        return self.matmul(left.transpose(1, 2), right, out, scale)


@dataclass(frozen=True)
class OneDnn:
    """oneDNN's, of one head at a time, in float32. Each call lays its right operand out anew: rows make up for it.

    Matrices with gaps between their rows or columns would be multiplied by a reference implementation, a hundred times
    slower: they are copied.
    """

    scores: int = 1 << 19
    least_rows: int = 128
    causal_rows: int = 384
    one_head: bool = True
    writes: bool = False

    def laid_out(self, operand: Tensor) -> Tensor:
        return operand.contiguous()

    def matmul(self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        first = scale != 1.0 and left.shape[2] <= right.shape[2]  # what is smaller is scaled
        pairs = [(_dense(a), _dense(b)) for a, b in zip(left, right, strict=True)]
        made = [_linear(a * scale if first else a, b.t()) for a, b in pairs]
        if scale != 1.0 and not first:
            for one in made:
                one.mul_(scale)
        return made[0][None] if len(made) == 1 else torch.stack(made)

    def transposed(
        self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0, *, onto: bool = False
    ) -> Tensor:
        if left.shape[1] < _SHORT:
            return self.matmul(left.transpose(1, 2), right, None, scale)
        return self.matmul(right.transpose(1, 2), left, None, scale).transpose(1, 2)


class Sum:
    """scale · Σ leftᵀ right over blocks of rows, in float32 at least.

    Args:
        into: [heads, m, n], what the sum is for; 0 in rows that no block has.
        right: [heads, rows, n].
        room: memory for the sum and for what is added to it, heads · m · n numbers each; None where `into` is as exact,
            or there is one block.
    """

    def __init__(
        self, products: Products, into: Tensor, right: Tensor, scale: float, room: tuple[Tensor, Tensor] | None
    ) -> None:
        self._products, self._into, self._right, self._scale = products, into, right, scale
        self._total, self._made, self._seen = into, None if room is None else room[1], 0
        if room is not None:
            self._total = room[0][: into.numel()].view(into.shape)

    def add(self, left: Tensor, rows: slice) -> None:
        """The block of these rows, [heads, rows, keys]; the first has the most keys."""
        keys, right, more = left.shape[2], self._right[:, rows], self._seen > 0
        total = self._total[:, :keys]
        self._seen = max(self._seen, keys)
        if self._made is None:
            made = self._products.transposed(left, right, total, self._scale, onto=more)
        else:
            into = self._made[: total.numel()].view(total.shape)
            made = self._products.transposed(left, right, into, self._scale)
        if made is not total:
            (total.add_ if more else total.copy_)(made)

    def finish(self) -> None:
        if self._total is not self._into:
            self._into[:, : self._seen] = self._total[:, : self._seen]
        self._into[:, self._seen :].zero_()


class Gathered:
    """The same as one product for each run of keys: rounded once, as it is in the written program.

    Args:
        into, right, scale: as in `Sum`.
        room: memory for all blocks, heads · rows · m numbers.
        step: keys of a run, and rows of a block, where rows see the keys up to their own place; None where all see all.
    """

    def __init__(
        self, products: Products, into: Tensor, right: Tensor, scale: float, room: Tensor, step: int | None
    ) -> None:
        self._products, self._into, self._right, self._scale = products, into, right, scale
        (heads, rows, _), keys = right.shape, into.shape[1]
        self._seen = keys if step is None else min(keys, rows)
        self._runs: list[tuple[slice, slice, Tensor]] = []  # keys, the rows that see them, and what these have of them
        for first in range(0, self._seen, step or keys):
            at, below = slice(first, min(self._seen, first + (step or keys))), slice(0 if step is None else first, rows)
            shape = (heads, below.stop - below.start, at.stop - at.start)
            self._runs.append((at, below, room[: math.prod(shape)].view(shape)))
            room = room[math.prod(shape) :]

    def add(self, left: Tensor, rows: slice) -> None:
        for at, below, lefts in self._runs:
            if at.start < left.shape[2]:
                lefts[:, rows.start - below.start : rows.stop - below.start] = left[:, :, at]

    def finish(self) -> None:
        for at, below, lefts in self._runs:
            into = self._into[:, at]
            made = self._products.transposed(lefts, self._right[:, below], into, self._scale)
            if made is not into:
                into.copy_(made)
        self._into[:, self._seen :].zero_()


LIBRARY: Final = Library()
ONEDNN: Final = OneDnn()


def products(query: Tensor, keys: int) -> Products:
    """What multiplies the fastest for queries [..., queries, depth] and so many keys."""
    suits = query.dtype == torch.float32 and query.shape[-2] * keys >= _SCORES_OF_A_CALL and query.shape[-1] > 0
    return ONEDNN if suits and bool(torch.backends.mkldnn.enabled) and slow_library() else LIBRARY


def _dense(matrix: Tensor) -> Tensor:
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ: [m, k], [n, k] -> [m, n]; the operator that Inductor calls for linear layers."""
    made: Any = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    found: Tensor = made
    return found
