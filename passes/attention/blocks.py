"""Attention in blocks: two products and a softmax, on so few scores at a time that they stay in cache.

`torch.ops.optpass.attention_in_blocks` and its backward, for CPUs. Where a processor multiplies faster than torch's own
flash attention makes it, in half precision and by the library of `products`, two products and a softmax are faster, as
long as no buffer of all scores is mapped, faulted in and moved through memory; causal blocks above the diagonal are not
computed. Nothing of size queries x keys is kept for the backward, which computes the weights again. No other kernel for
CPUs has a backward through a softcap.

The operators alone are here: whether they pay is the gate's to say, and the call is written by `rewrite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from optpass.passes.attention.draws import Seeded
from optpass.passes.attention.products import Gathered, Sum, products

#: Queries of a causal block: fewer compute less in vain beside the diagonal, more make larger products.
_CAUSAL_ROWS: Final = 256
#: Keys for each column of a query from which scaling all queries first takes less time than scaling the scores.
_SCALED_KEYS: Final = 8
#: Scores of some heads of which weights are kept until the gradients of keys and values are summed: 16 MiB in bfloat16.
_GATHERED: Final = 1 << 23
#: Bytes of a number in dtypes in which a sum of rounded products is less exact than the product of all.
_ROUNDED: Final = 2
#: Tensors of a block that are results of products.
_OF_PRODUCTS: Final = frozenset({"scores", "passed"})

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: No operator's result depends on the strides that it is given.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "flexible_layout", None), torch.Tag.pt2_compliant_tag) if tag)
_LIBRARY.define(
    "attention_in_blocks(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, "
    "float scale=1.0, float softcap=0.0, float dropout_p=0.0, Tensor? seed=None) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "attention_in_blocks_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "bool is_causal=False, float scale=1.0, float softcap=0.0, float dropout_p=0.0, Tensor? seed=None) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@dataclass(frozen=True)
class _Block:
    """Flat heads (batch and heads in one), queries, and how many keys any of them sees."""

    heads: slice
    queries: slice
    keys: int

    @property
    def place(self) -> tuple[int, int]:
        return self.heads.start, self.queries.start


def _drawn(probability: float, seed: Tensor | None) -> Seeded | None:
    if not probability:
        return None
    if seed is None or not 0.0 < probability < 1.0:
        raise ValueError(f"attention_in_blocks: dropout_p={probability} needs a seed, and to be in [0, 1)")
    return Seeded(probability, int(seed.item()))


class _Region:
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
        # What is dropped depends on the blocks, and these must not on anything that may change before the backward.
        per_block = self.products.scores * (1 if draw else torch.get_num_threads())
        rows = max(self.products.least_rows, per_block // max(1, self.keys))
        self.block_rows = min(self.rows, rows, _CAUSAL_ROWS) if causal else min(self.rows, rows)
        self.block_heads = 1 if self.products.one_head else max(1, per_block // max(1, self.block_rows * self.keys))
        self._above = _above(query, self.block_rows) if causal else None

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

    def blocks(self, heads: slice) -> Iterator[_Block]:
        for first in range(0, self.rows, self.block_rows):
            last = min(self.rows, first + self.block_rows)
            yield _Block(heads, slice(first, last), min(last, self.keys) if self.causal else self.keys)

    def room(self, *names: str) -> dict[str, Tensor]:
        """Memory of a block for each name, in one piece, which allocators keep rather than return to the system.

        Results of products are left out where those come in memory of their own.
        """
        kept = [name for name in names if self.products.writes or name not in _OF_PRODUCTS]
        size = min(self.block_heads, self.batch * self.heads) * self.block_rows * self.keys
        pieces = self.query.new_empty(len(kept) * size).view(len(kept), size).unbind()
        return dict(zip(kept, pieces, strict=True))

    def gathered(self) -> list[Tensor]:
        """Memory for the weights of some heads and what passes through them, all rows at once; [] where that is too
        much, or nothing is lost without: in float32, and in a single block."""
        size = min(self.block_heads, self.batch * self.heads) * self.rows * self.keys
        exact = self.query.dtype.itemsize > _ROUNDED or self.block_rows >= self.rows
        return [] if exact or size > _GATHERED else [*self.query.new_empty(2, size).unbind()]

    def weights(self, block: _Block, room: Mapping[str, Tensor]) -> Tensor:
        """The softmax of a block, in the room for 'scores'.

        The room for 'bounded' gets the hyperbolic tangent of the scores, where there is a softcap.
        """
        shape = (block.heads.stop - block.heads.start, block.queries.stop - block.queries.start, block.keys)
        key = self.key[block.heads, : block.keys].transpose(1, 2)
        into = _shaped(room.get("scores"), shape)
        scores = self.products.matmul(self.query[block.heads, block.queries], key, into, self.factor)
        if self.softcap:
            bounded = _shaped(room.get("bounded"), shape)
            bounded = scores if bounded is None else bounded
            torch.mul(torch.tanh(scores, out=bounded), self.softcap, out=scores)
        if self._above is not None and block.queries.start < block.keys:
            _hide(scores[:, :, block.queries.start :], self._above)
        mask = self._masking(block)
        if mask is None or mask.dtype == torch.bool:
            if mask is not None:
                scores.masked_fill_(mask.logical_not(), float("-inf"))
            return torch.softmax(scores, -1, out=scores)
        wide = scores.to(torch.promote_types(mask.dtype, torch.float32)).add_(mask)
        if wide.dtype == scores.dtype:
            return torch.softmax(wide, -1, out=wide)
        return scores.copy_(torch.softmax(wide, -1))  # in place takes 1.15 times as long for 89 keys

    def _masking(self, block: _Block) -> Tensor | None:
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


def _forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    draw = _drawn(dropout_p, seed)
    region = _Region(query, key, value, attn_mask, is_causal, scale, softcap, draw)
    out = query.new_empty((query.shape[0] * query.shape[1], query.shape[2], value.shape[3]))
    room = region.room("scores", *(("kept",) if draw else ()))
    for heads in region.head_chunks():
        for block in region.blocks(heads):
            made, seen = region.weights(block, room), region.value[heads, : block.keys]
            if draw is not None:
                made.mul_(draw.kept(block.place, _room(room, "kept", made)))
            _into(out[heads, block.queries], region.products.matmul, made, seen, region.kept_scale)
    return out.view(*query.shape[:3], value.shape[3])


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    region = _Region(query, key, value, attn_mask, is_causal, scale, softcap, _drawn(dropout_p, seed))
    grad = region.products.laid_out(grad.reshape(-1, *grad.shape[2:]))
    grads = [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (region.query, region.key, region.value)
    ]
    room = region.room(
        "scores", "passed", *(("bounded",) if softcap else ()), *(("kept", "left") if region.draw else ())
    )
    gathered = region.gathered()
    for heads in region.head_chunks():
        _head_gradients(region, grad, grads, heads, room, gathered)
    shaped = [grads[0].view(query.shape)]
    for made, like in zip(grads[1:], (key, value), strict=True):
        split = made.view(*like.shape[:2], region.groups, *like.shape[2:])
        shaped.append(split.sum(2) if region.groups > 1 else split.squeeze(2))
    return shaped[0], shaped[1], shaped[2]


def _head_gradients(
    region: _Region, grad: Tensor, grads: list[Tensor], heads: slice, room: Mapping[str, Tensor], gathered: list[Tensor]
) -> None:
    """Gradients of some heads. What is in cache is used at once: the weights before the gradient passed to them."""
    query, key, value, products = region.query, region.key, region.value, region.products
    blocks = [*region.blocks(heads)][::-1]  # the first sees all keys that any sees
    sums = [(grads[1][heads], query[heads], region.factor), (grads[2][heads], grad[heads], region.kept_scale)]
    of_key, of_value = (_summed(region, *parts, gathered[at : at + 1], len(blocks)) for at, parts in enumerate(sums))
    for block in blocks:
        own, seen = (heads, block.queries), (heads, slice(block.keys))
        weights = left = region.weights(block, room)
        kept, draw = None, region.draw
        if draw is not None:
            kept = draw.kept(block.place, _room(room, "kept", weights))
            left = torch.mul(weights, kept, out=_room(room, "left", weights))
        of_value.add(left, block.queries)
        into = _shaped(room.get("passed"), weights.shape)
        passed = products.matmul(grad[own], value[seen].transpose(1, 2), into, region.kept_scale)
        if kept is not None:
            passed.mul_(kept)
        torch._softmax_backward_data(passed, weights, -1, weights.dtype, grad_input=passed)
        if region.softcap:
            bounded = _room(room, "bounded", weights)
            torch.ops.aten.tanh_backward.grad_input(passed, bounded, grad_input=passed).mul_(region.softcap)
        of_key.add(passed, block.queries)
        _into(grads[0][own], products.matmul, passed, key[seen], region.scale)
    of_key.finish()
    of_value.finish()


def _summed(
    region: _Region, into: Tensor, right: Tensor, scale: float, gathered: list[Tensor], blocks: int
) -> Sum | Gathered:
    if not gathered:
        return Sum(region.products, into, right, scale, blocks == 1)
    step = region.block_rows if region.causal else None
    return Gathered(region.products, into, right, scale, gathered[0], step)


def _into(out: Tensor, matmul: Callable[..., Tensor], left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """scale · left right in the memory of `out`."""
    made = matmul(left, right, out, scale)
    if made is not out:
        out.copy_(made)


def _hide(scores: Tensor, above: Tensor) -> None:
    """Minus infinity above the diagonal, whatever is there: it is 0 first, so that nothing is added to NaN.

    Two passes that know no condition take a third of the time of one that does.
    """
    rows, keys = scores.shape[1], min(scores.shape[1:])
    scores[:, :, :rows].tril_().add_(above[:rows, :keys])


def _above(like: Tensor, side: int) -> Tensor:
    """Minus infinity above the diagonal, 0 elsewhere."""
    return like.new_full((side, side), float("-inf")).triu_(1)


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


def _room(room: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """The room of that name, shaped like a tensor of the block."""
    return room[name][: like.numel()].view(like.shape)


def _shaped(buffer: Tensor | None, shape: Any) -> Tensor | None:
    return None if buffer is None else buffer[: math.prod(shape)].view(shape)


def _fake(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, *options, seed = inputs
    ctx.save_for_backward(query, key, value, mask, seed)
    ctx.options = options


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, seed = ctx.saved_tensors
    backward = torch.ops.optpass.attention_in_blocks_backward
    return (*backward(grad, query, key, value, mask, *ctx.options, seed), *(None,) * 6)


_LIBRARY.impl("attention_in_blocks", _forward, "CPU")
_LIBRARY.impl("attention_in_blocks_backward", _backward, "CPU")
torch.library.register_fake("optpass::attention_in_blocks", _fake, lib=_LIBRARY)
torch.library.register_fake("optpass::attention_in_blocks_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("optpass::attention_in_blocks", _gradients, setup_context=_keep, lib=_LIBRARY)

#: `(query, key, value, attn_mask=None, is_causal=False, scale=1.0, softcap=0.0, dropout_p=0.0, seed=None) -> result`;
#: see `attention_in_blocks`.
OPERATOR: Any = torch.ops.optpass.attention_in_blocks.default


def attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v, as `F.scaled_dot_product_attention` computes it.

    Args:
        query: [batch, heads, queries, depth], of a CPU; scores and weights are rounded to its dtype.
        key: [batch, kv_heads, keys, depth]; heads must be a multiple of kv_heads.
        value: [batch, kv_heads, keys, width].
        attn_mask: broadcasts to [batch, heads, queries, keys]. Bool: True where a key is seen; a row without one is
            NaN, not zeros. Float: added in float32, or its own dtype where that is wider.
        is_causal: a query sees the keys up to its own place, both counted from 0.
        softcap: unless 0, softcap · tanh(q kᵀ · scale) stands in place of q kᵀ · scale, as in Gemma 2.
        dropout_p: probability in [0, 1) with which a weight is dropped; the others are divided by 1 - dropout_p.
        seed: [1] int64, what decides which are; needed where `dropout_p` is not 0.

    Returns:
        [batch, heads, queries, width], contiguous.
    """
    found: Tensor = OPERATOR(query, key, value, attn_mask, is_causal, scale, softcap, dropout_p, seed)
    return found
