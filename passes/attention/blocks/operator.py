"""Attention in blocks: two products and a softmax, on so few scores at a time that they stay in cache.

`torch.ops.optpass.attention_in_blocks` and its backward, for CPUs. Where a processor multiplies faster than torch's own
flash attention makes it, in half precision and by the library of `products`, two products and a softmax are faster, as
long as no buffer of all scores is mapped, faulted in and moved through memory; causal blocks above the diagonal are not
computed. Half precision that a processor has no instructions for is computed in float32: the backward of torch's own
multiplies one number after another there. Nothing of size queries x keys is kept for the backward, which computes the
weights again. No other kernel for CPUs has a backward through a softcap.

The operators alone are here: whether they pay is the gate's to say, and the call is written by `rewrite`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from optpass.passes.attention.blocks.draws import Seeded
from optpass.passes.attention.blocks.products import Gathered, Sum
from optpass.passes.attention.blocks.regions import Region, room_of, shaped
from optpass.passes.attention.blocks.team import share
from optpass.passes.processor import multiplied_in

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: No operator's result depends on the strides that it is given.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "flexible_layout", None), torch.Tag.pt2_compliant_tag) if tag)
_LIBRARY.define(
    "attention_in_blocks(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, "
    "float scale=1.0, float softcap=0.0, float dropout_p=0.0, Tensor? seed=None, bool wide=False) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "attention_in_blocks_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "bool is_causal=False, float scale=1.0, float softcap=0.0, float dropout_p=0.0, Tensor? seed=None, "
    "bool wide=False) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

#: Of the mean square of a head's values, the part that their mean must have to be looked at apart.
_COMMON = 0.1


def _drawn(probability: float, seed: Tensor | None) -> Seeded | None:
    if not probability:
        return None
    if seed is None or not 0.0 < probability < 1.0:
        raise ValueError(f"attention_in_blocks: dropout_p={probability} needs a seed, and to be in [0, 1)")
    return Seeded(probability, int(seed.item()))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None, wide: bool = False,
) -> Tensor:  # fmt: skip
    dtype, draw = query.dtype, _drawn(dropout_p, seed)
    query, key, value = (t.to(multiplied_in(dtype)) for t in (query, key, value))
    region = Region(query, key, value, attn_mask, is_causal, scale, softcap, draw)
    out = query.new_empty((query.shape[0] * query.shape[1], query.shape[2], value.shape[3]))
    rooms = region.rooms("scores", *(("kept",) if draw else ()))

    def attend(worker: int, heads: slice) -> None:
        room = rooms[worker]
        for block in region.blocks(heads):
            made, seen = region.weights(block, room), region.value[heads, : block.keys]
            if draw is not None:
                made.mul_(draw.kept(block.place, room_of(room, "kept", made)))
            _into(out[heads, block.queries], region.products.matmul, made, seen, region.kept_scale)

    share(attend, [*region.head_chunks()], region.workers)
    return out.view(*query.shape[:3], value.shape[3]).to(dtype)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = query.dtype
    grad, query, key, value = (t.to(multiplied_in(dtype)) for t in (grad, query, key, value))
    region = Region(query, key, value, attn_mask, is_causal, scale, softcap, _drawn(dropout_p, seed))
    grad = region.products.laid_out(grad.reshape(-1, *grad.shape[2:]))
    grads = [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (region.query, region.key, region.value)
    ]
    shifts, large = _shifts(region, grad)
    names = ("scores", "passed", *(("bounded",) if softcap else ()), *(("kept", "left") if region.draw else ()))
    rooms = region.rooms(*names, wide=wide and region.rounds)
    rooms = [room | sums for room, sums in zip(rooms, region.sums(), strict=True)]

    def pass_back(worker: int, heads: slice) -> None:
        _head_gradients(region, grad, grads, heads, rooms[worker], shifts if large else None, wide)

    share(pass_back, [*region.head_chunks()], region.workers)
    found = [grads[0].view(query.shape)]
    for made, like in zip(grads[1:], (key, value), strict=True):
        split = made.view(*like.shape[:2], region.groups, *like.shape[2:])
        found.append(split.sum(2) if region.groups > 1 else split.squeeze(2))
    of_query, of_key, of_value = (gradient.to(dtype) for gradient in found)
    return of_query, of_key, of_value


def _head_gradients(
    region: Region, grad: Tensor, grads: list[Tensor], heads: slice, room: Mapping[str, Tensor],
    shifts: Tensor | None, wide: bool,
) -> None:  # fmt: skip
    """Gradients of some heads. What is in cache is used at once: the weights before the gradient passed to them.

    Args:
        shifts: [heads, rows, 1], added to what is passed to all weights of a row.
        wide: as for `attention_in_blocks`.
    """
    query, key, value, products = region.query, region.key, region.value, region.products
    blocks = [*region.blocks(heads)][::-1]  # the first sees all keys that any sees
    of_key = _summed(region, grads[1][heads], query[heads], region.factor, room, "key")
    of_value = _summed(region, grads[2][heads], grad[heads], region.kept_scale, room, "value")
    for block in blocks:
        own, seen = (heads, block.queries), (heads, slice(block.keys))
        weights = left = region.weights(block, room)
        kept, draw = None, region.draw
        if draw is not None:
            kept = draw.kept(block.place, room_of(room, "kept", weights))
            left = torch.mul(weights, kept, out=room_of(room, "left", weights))
        of_value.add(left, block.queries)
        into = shaped(room.get("passed"), weights.shape)
        if shifts is None or into is None:
            passed = products.matmul(grad[own], value[seen].transpose(1, 2), into, region.kept_scale)
        else:
            passed = torch.baddbmm(shifts[own], grad[own], value[seen].transpose(1, 2), out=into)
        if kept is not None:
            passed.mul_(kept)
        if wide and region.rounds:
            full = room_of(room, "added", passed).copy_(passed)
            whole = room_of(room, "softmax", weights)  # of which `weights` are rounded
            torch._softmax_backward_data(full, whole, -1, full.dtype, grad_input=full)
            passed.copy_(full)
        else:
            torch._softmax_backward_data(passed, weights, -1, weights.dtype, grad_input=passed)
        if region.softcap:
            bounded = room_of(room, "bounded", weights)
            torch.ops.aten.tanh_backward.grad_input(passed, bounded, grad_input=passed).mul_(region.softcap)
        of_key.add(passed, block.queries)
        _into(grads[0][own], products.matmul, passed, key[seen], region.scale)
    of_key.finish()
    of_value.finish()


def _shifts(region: Region, grad: Tensor) -> tuple[Tensor | None, bool]:
    """[heads, rows, 1]: what is passed back to all weights of a row alike, negative, and whether it is worth adding.

    The backward of a softmax takes it off again; any finite number is right. Added before the gradient of the weights
    is rounded, it leaves little to be rounded where values have a large common mean. Memory is held in any case: how
    much must not depend on the values.
    """
    if not region.rounds or region.draw is not None:
        return None, False
    wide = torch.promote_types(grad.dtype, torch.float32)
    middle = region.value.mean(1, keepdim=True, dtype=wide)
    squares = torch.linalg.vector_norm(region.value, dim=(1, 2), keepdim=True, dtype=wide).square()
    large = middle.square().sum(2, keepdim=True) * region.keys > squares * _COMMON
    middle = torch.where(large, middle, 0.0).to(grad.dtype)
    shifts = torch.bmm(grad, middle.transpose(1, 2)).nan_to_num_(0.0, 0.0, 0.0).neg_()
    return shifts, bool(large.any())


def _summed(
    region: Region, into: Tensor, right: Tensor, scale: float, room: Mapping[str, Tensor], of: str
) -> Sum | Gathered:
    if (gathered := room.get(f"gathered {of}")) is not None:
        return Gathered(region.products, into, right, scale, gathered, region.block_rows if region.causal else None)
    summed = (room[f"sum {of}"], room["made"]) if "made" in room else None
    return Sum(region.products, into, right, scale, summed)


def _into(out: Tensor, matmul: Callable[..., Tensor], left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """scale · left right in the memory of `out`."""
    made = matmul(left, right, out, scale)
    if made is not out:
        out.copy_(made)


def _fake(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None, wide: bool = False,
) -> Tensor:  # fmt: skip
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, *options, seed, wide = inputs
    ctx.save_for_backward(query, key, value, mask, seed)
    ctx.options, ctx.wide = options, wide
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # none comes back where `twice` differentiates in its place
        return (None,) * 10
    query, key, value, mask, seed = ctx.saved_tensors
    backward = torch.ops.optpass.attention_in_blocks_backward
    return (*backward(grad, query, key, value, mask, *ctx.options, seed, ctx.wide), *(None,) * 7)


_LIBRARY.impl("attention_in_blocks", _forward, "CPU")
_LIBRARY.impl("attention_in_blocks_backward", _backward, "CPU")
torch.library.register_fake("optpass::attention_in_blocks", _fake, lib=_LIBRARY)
torch.library.register_fake("optpass::attention_in_blocks_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("optpass::attention_in_blocks", _gradients, setup_context=_keep, lib=_LIBRARY)

#: `(query, key, value, attn_mask=None, is_causal=False, scale=1.0, softcap=0.0, dropout_p=0.0, seed=None, wide=False)
#: -> result`; see `attention_in_blocks`.
OPERATOR: Any = torch.ops.optpass.attention_in_blocks.default


def attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float = 1.0, softcap: float = 0.0, dropout_p: float = 0.0, seed: Tensor | None = None, wide: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v, as `F.scaled_dot_product_attention` computes it.

    Args:
        query: [batch, heads, queries, depth], of a CPU; scores and weights are rounded to its dtype, or not at all
            (see `multiplied_in`).
        key: [batch, kv_heads, keys, depth]; heads must be a multiple of kv_heads.
        value: [batch, kv_heads, keys, width].
        attn_mask: broadcasts to [batch, heads, queries, keys]. Bool: True where a key is seen; a row without one is
            NaN, not zeros. Float: added in float32, or its own dtype where that is wider.
        is_causal: a query sees the keys up to its own place, both counted from 0.
        softcap: unless 0, softcap · tanh(q kᵀ · scale) stands in place of q kᵀ · scale, as in Gemma 2.
        dropout_p: probability in [0, 1) with which a weight is dropped; the others are divided by 1 - dropout_p.
        seed: [1] int64, what decides which are; needed where `dropout_p` is not 0.
        wide: the backward passes the softmax with weights in float32, as a program does that takes its softmax in it:
            with weights rounded to bfloat16 the gradients of queries and keys are 1.06 times as wrong. It takes 1.05 to
            1.1 times as long.

    Returns:
        [batch, heads, queries, width], contiguous.
    """
    found: Tensor = OPERATOR(query, key, value, attn_mask, is_causal, scale, softcap, dropout_p, seed, wide)
    return found
