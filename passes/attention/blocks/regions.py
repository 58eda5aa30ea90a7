"""How attention in blocks is cut: one attention's operands, the blocks of their scores, and the softmax of a block.

What is done with the weights of a block, forward and backward, is `blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import torch
from torch import Tensor

from optpass.passes.attention.blocks.draws import Seeded
from optpass.passes.attention.blocks.products import products
from optpass.passes.attention.blocks.team import workers

#: What the queries of causal blocks are a multiple of: others take up to 1.3 times as long.
_ALIGNED_ROWS: Final = 64
#: Keys for each column of a query from which scaling all queries first takes less time than scaling the scores.
_SCALED_KEYS: Final = 8
#: Scores of some heads of which weights are kept until the gradients of keys and values are summed: 16 MiB in bfloat16.
_GATHERED: Final = 1 << 23
#: Bytes of a number in dtypes in which products are rounded to less than what they are summed in.
_ROUNDED: Final = 2
#: Tensors of a block that are results of products.
_OF_PRODUCTS: Final = frozenset({"scores", "passed"})


@dataclass(frozen=True)
class Block:
    """Flat heads (batch and heads in one), queries, and how many keys any of them sees."""

    heads: slice
    queries: slice
    keys: int

    @property
    def place(self) -> tuple[int, int]:
        return self.heads.start, self.queries.start


class Region:
    """One attention, its operands with batch and heads in one dim, cut into blocks."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
        softcap: float, draw: Seeded | None,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.rows, self.depth = query.shape
        self.keys = key.shape[2]
        self.groups = self.heads // key.shape[1]
        self.products = products(query, self.keys)
        flat = query.reshape(-1, self.rows, self.depth)
        folds = _folds(query.dtype, scale) and (self.products.one_head or self.keys >= _SCALED_KEYS * self.depth)
        self.query = torch.mul(flat, scale, out=flat.new_empty(flat.shape)) if folds else self.products.laid_out(flat)
        #: Of a product with `query`, which is scaled already where that is as exact.
        self.factor = 1.0 if folds else scale
        self.key, self.value = (self.products.laid_out(_repeated(t, self.groups)) for t in (key, value))
        self.mask, self.causal, self.scale, self.softcap, self.draw = mask, causal, scale, softcap, draw
        total, threads = self.batch * self.heads, torch.get_num_threads()
        computed = total * self.rows * self.keys // (2 if causal else 1)
        #: Workers that share the heads; 1 leaves it to each operator to share its own work.
        self.workers = workers(total, computed)
        # What is dropped depends on the blocks, and these must not on anything that may change before the backward.
        per_block = self.products.scores * (threads if self.workers == 1 and not draw else 1)
        rows = max(self.products.least_rows, per_block // max(1, self.keys))
        rows = min(rows, _alike(self.rows, self.products.causal_rows)) if causal else rows
        self.block_rows = min(self.rows, rows)
        heads = 1 if self.products.one_head else max(1, per_block // max(1, self.block_rows * self.keys))
        chunks = -(-total // heads)
        if draw and chunks < self.workers:
            self.workers = 1
        elif self.workers > 1 and not draw:  # as many for each
            heads = -(-total // (-(-chunks // threads) * threads))
        self.block_heads = heads
        self._above = _above(query, self.block_rows) if causal else None
        self._hidden = query.new_full((), float("-inf"))

    @property
    def rounds(self) -> bool:
        """Whether products are rounded to less than what they are summed in."""
        return self.query.dtype.itemsize <= _ROUNDED

    @property
    def kept_scale(self) -> float:
        """What weights that are kept are multiplied by."""
        return self.draw.scale if self.draw else 1.0

    def head_chunks(self) -> Iterator[slice]:
        """Heads of a block; of one batch only where the mask tells heads or batches apart."""
        shared = self.mask is None or self.mask.shape[:-2].numel() == 1
        step = self.batch * self.heads if shared else self.heads
        for start in range(0, self.batch * self.heads, max(1, step)):
            for first in range(start, start + step, self.block_heads):
                yield slice(first, min(start + step, first + self.block_heads))

    def blocks(self, heads: slice) -> Iterator[Block]:
        for first in range(0, self.rows, self.block_rows):
            last = min(self.rows, first + self.block_rows)
            yield Block(heads, slice(first, last), min(last, self.keys) if self.causal else self.keys)

    def rooms(self, *names: str, wide: bool = False) -> list[dict[str, Tensor]]:
        """Memory of a block for each name, for each worker, in one piece, which allocators keep rather than return.

        Results of products are held but not handed out where those come in memory of their own: workers' is not seen by
        whoever counts what the caller allocates. What a float mask is added in comes by itself; `wide`: what weights
        are made in before they are rounded, as well.
        """
        size = min(self.block_heads, self.batch * self.heads) * self.block_rows * self.keys
        self._held = self.query.new_empty(self.workers * len(names) * size).view(self.workers, len(names), size)
        handed = [self.products.writes or name not in _OF_PRODUCTS for name in names]
        rooms = [dict(compress(zip(names, piece.unbind(), strict=True), handed)) for piece in self._held.unbind()]
        narrow = self.query.dtype
        dtype = torch.promote_types(narrow, torch.float32) if wide else narrow
        dtype = dtype if self.mask is None else torch.promote_types(dtype, _wide(self.mask, narrow))
        if dtype != narrow:
            pieces = self.query.new_empty(self.workers, 2, size, dtype=dtype).unbind()
            for room, piece in zip(rooms, pieces, strict=True):
                room["added"], room["softmax"] = piece.unbind()
        return rooms

    def sums(self) -> list[dict[str, Tensor]]:
        """For each worker the memory in which gradients of keys and values are summed over blocks; none where they are
        made where they belong, in float32 and from a single block.

        'gathered key' and 'gathered value' hold the weights of some heads and what passes through them, all rows at
        once; where that is too much, 'sum key' and 'sum value' hold sums and 'made' what is added.
        """
        if not self.rounds or self.block_rows >= self.rows:
            return [{} for _ in range(self.workers)]
        heads = min(self.block_heads, self.batch * self.heads)
        if (size := heads * self.rows * self.keys) * self.workers <= _GATHERED:
            pairs = self.query.new_empty(self.workers, 2, size)
            return [
                dict(zip(("gathered key", "gathered value"), pair.unbind(), strict=True)) for pair in pairs.unbind()
            ]
        size = heads * self.keys * max(self.depth, self.value.shape[-1])
        wide = torch.promote_types(self.query.dtype, torch.float32)
        totals, made = self.query.new_empty(self.workers, 2, size, dtype=wide), self.query.new_empty(self.workers, size)
        return [{"sum key": t[0], "sum value": t[1], "made": m} for t, m in zip(totals, made, strict=True)]

    def weights(self, block: Block, room: Mapping[str, Tensor]) -> Tensor:
        """The softmax of a block, in the room for 'scores'.

        The room for 'bounded' gets the hyperbolic tangent of the scores, where there is a softcap; that for 'softmax',
        where there is one, the weights before they are rounded.
        """
        shape = (block.heads.stop - block.heads.start, block.queries.stop - block.queries.start, block.keys)
        key = self.key[block.heads, : block.keys].transpose(1, 2)
        into = shaped(room.get("scores"), shape)
        scores = self.products.matmul(self.query[block.heads, block.queries], key, into, self.factor)
        if self.softcap:
            bounded = shaped(room.get("bounded"), shape)
            bounded = scores if bounded is None else bounded
            torch.mul(torch.tanh(scores, out=bounded), self.softcap, out=scores)
        if self._above is not None and block.queries.start < block.keys:
            _hide(scores[:, :, block.queries.start :], self._above)
        mask = self._masking(block)
        if mask is not None and mask.dtype == torch.bool:
            torch.where(mask, scores, self._hidden, out=scores)
            mask = None
        if "added" not in room:
            return torch.softmax(scores if mask is None else scores.add_(mask), -1, out=scores)
        wide = room_of(room, "added", scores).copy_(scores)
        wide = wide if mask is None else wide.add_(mask)
        return scores.copy_(torch.softmax(wide, -1, out=room_of(room, "softmax", scores)))  # in place takes 1.15 times

    def _masking(self, block: Block) -> Tensor | None:
        """The mask of a block, broadcast to its three dims."""
        if self.mask is None:
            return None
        mask = self.mask[(None,) * (4 - self.mask.dim())]
        batch, heads, rows, keys = mask.shape
        inside = slice(first := block.heads.start % self.heads, first + block.heads.stop - block.heads.start)
        mask = mask[block.heads.start // self.heads if batch > 1 else 0]
        mask = mask[inside] if heads > 1 else mask
        mask = mask[:, block.queries] if rows > 1 else mask
        return mask[:, :, : block.keys] if keys > 1 else mask


def _wide(mask: Tensor, dtype: torch.dtype) -> torch.dtype:
    """In which a mask is added to scores."""
    if mask.dtype == torch.bool:
        return dtype
    return torch.promote_types(mask.dtype, torch.promote_types(dtype, torch.float32))


def _hide(scores: Tensor, above: Tensor) -> None:
    """Minus infinity above the diagonal, whatever is there: it is 0 first, so that nothing is added to NaN.

    Two passes that know no condition take a third of the time of one that does.
    """
    rows, keys = scores.shape[1], min(scores.shape[1:])
    scores[:, :, :rows].tril_().add_(above[:rows, :keys])


def _above(like: Tensor, side: int) -> Tensor:
    """Minus infinity above the diagonal, 0 elsewhere."""
    return like.new_full((side, side), float("-inf")).triu_(1)


def _alike(rows: int, most: int) -> int:
    """Rows of blocks that are as alike as can be: a short one takes nearly as long as a long one."""
    blocks = max(1, -(-rows // most))
    return -(-rows // (blocks * _ALIGNED_ROWS)) * _ALIGNED_ROWS


def _folds(dtype: torch.dtype, scale: float) -> bool:
    """Whether scaled queries make scores as exact as scaling these does: always unless rounded, which half would be."""
    if scale == 1.0 or not 0.0 < abs(scale) < 1.0:
        return False
    exact = dtype == torch.bfloat16 and math.frexp(scale)[0] in (0.5, -0.5)
    return exact or dtype in (torch.float32, torch.float64)


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    """Batch and heads in one dim, written out for every query head."""
    tensor = tensor.repeat_interleave(groups, 1) if groups > 1 else tensor
    return tensor.reshape(-1, *tensor.shape[2:])


def room_of(room: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """The room of that name, shaped like a tensor of the block."""
    return room[name][: like.numel()].view(like.shape)


def shaped(buffer: Tensor | None, shape: Any) -> Tensor | None:
    return None if buffer is None else buffer[: math.prod(shape)].view(shape)
