"""Scaled dot-product attention: fused kernels of every backend, the math form, flex attention, and their
backwards.

Only the matrix products are counted (scale, mask, softmax and dropout inside the kernel are not): the
convention of FlashAttention (Dao et al. 2022, section 4; FlashAttention-2, section 4.1: 4 * s^2 * d * heads,
causal divides by 2, backward is 2.5 times forward because it recomputes QK^T). Not here: the softmax ops of
hand-written attention.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import numel, shape

Layout = Literal["bhsd", "bshd"]


def _twice_integral(x: int, top: int) -> int:
    """2 * integral from 0 to x of clamp(t, 0, top) dt, an integer for integer bounds."""
    if x <= 0:
        return 0
    return x * x if x <= top else top * top + 2 * top * (x - top)


def twice_area(
    sq: int,
    sk: int,
    causal: bool,
    bottom_right: bool = False,
    left: int | None = None,
    right: int | None = None,
) -> int:
    """Twice the area of the scores that a mask keeps, of a sq x sk rectangle, edges cut through cells (so
    sq*sk/2 if square).

    Row i keeps columns from i + d - left to i + d + right, d = sk - sq when aligned bottom right, else 0.
    Causal is right = 0. A window of None or a negative number has no edge on that side.
    """
    shift = sk - sq if bottom_right else 0
    if causal:
        right = 0
    kept = 2 * sq * sk
    if right is not None and right >= 0:  # column > i + shift + right falls away: integrate what is left below
        low = shift + right
        kept = _twice_integral(sq + low, sk) - _twice_integral(low, sk)
    if left is not None and left >= 0:  # column < i + shift - left falls away
        low = shift - left
        kept -= _twice_integral(sq + low, sk) - _twice_integral(low, sk)
    return max(kept, 0)


def _cost(q: Any, k: Any, v: Any, area2: int, layout: Layout, backward: bool) -> OpCost:
    """Forward: QK^T (d) and PV (d_v). Backward: QK^T again, dQ, dK (d each), dP and dV (d_v each)."""
    sq_, sk_ = shape(q), shape(k)
    d, dv = sq_[-1], shape(v)[-1]
    heads = sq_[-2] if layout == "bshd" else sq_[-3]
    rows, cols = (sq_[-3], sk_[-3]) if layout == "bshd" else (sq_[-2], sk_[-2])
    batch = prod(sq_[:-3]) * heads
    widths = 3 * d + 2 * dv if backward else d + dv
    return OpCost(area2 * widths * batch, "attention", (rows, cols, d), batch)


@register(
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
    "_cudnn_attention_forward",
    "optpass::attention_in_blocks",
)
def _forward(c: Call) -> OpCost:
    q, k, v = c.arg("query"), c.arg("key"), c.arg("value")
    # The math form computes every score and masks afterwards; the others skip what is above the diagonal.
    causal = bool(c.arg("is_causal", False)) and "_math" not in c.name
    return _cost(q, k, v, twice_area(shape(q)[-2], shape(k)[-2], causal), "bhsd", backward=False)


@register(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_cudnn_attention_backward",
    "optpass::attention_in_blocks_backward",
    "optpass::cudnn_attention_backward",
)
def _backward(c: Call) -> OpCost:
    q, k, v = c.arg("query"), c.arg("key"), c.arg("value")
    area2 = twice_area(shape(q)[-2], shape(k)[-2], bool(c.arg("is_causal", False)))
    return _cost(q, k, v, area2, "bhsd", backward=True)


def _lengths(offsets: Any) -> list[int] | None:
    """Sequence lengths from cumulative offsets, where their values are at hand (a real CPU tensor)."""
    if type(offsets) is torch.Tensor and offsets.device.type == "cpu":
        return [int(x) for x in offsets.diff().tolist()]
    return None


def _packed_area2(c: Call, q: Any, k: Any, offsets: tuple[Any, Any], causal: bool, **edges: Any) -> int:
    """Twice the score area of packed sequences: exact from real offsets, else every query against the longest
    key.
    """
    rows, cols = _lengths(offsets[0]), _lengths(offsets[1] if offsets[1] is not None else offsets[0])
    if rows is not None and cols is not None:
        return sum(twice_area(a, b, causal, **edges) for a, b in zip(rows, cols, strict=True))
    total, groups = shape(q)[-3], max(numel(offsets[0]) - 1, 1)
    longest = next((c.arg(n) for n in ("max_k", "max_seqlen_k") if c.arg(n) is not None), shape(k)[-3])
    # Causal cuts equal sequences of the mean length; the values that would say more are not known here.
    full, cut = (
        2 * total * min(longest, shape(k)[-3]),
        twice_area(total // groups, longest, causal, **edges) * groups,
    )
    return min(full, cut) if causal or edges.get("left") is not None else full


@register(
    "_flash_attention_forward",
    "_flash_attention_backward",
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_out",
    "torch_attn::_varlen_attn_backward",
)
def _flash_packed(c: Call) -> OpCost:
    """Layout (batch, sequence, heads, d) or packed (total, heads, d); causal is aligned bottom right
    (FlashAttention 2.1).
    """
    q, k, v = c.arg("query"), c.arg("key"), c.arg("value")
    window = c.arg("window_size")
    left, right = window if window is not None else (c.arg("window_size_left"), c.arg("window_size_right"))
    causal, backward = bool(c.arg("is_causal", False)), "backward" in c.name
    edges = {"bottom_right": True, "left": left, "right": right}
    offsets = next(((c.arg(a), c.arg(a[:-1] + "k")) for a in ("cum_seq_q", "cu_seq_q") if a in c.names), (None, None))
    if offsets[0] is None:
        area2 = twice_area(shape(q)[-3], shape(k)[-3], causal, **edges)
    else:
        area2 = _packed_area2(c, q, k, offsets, causal, **edges)
    return _cost(q, k, v, area2, "bshd", backward)


@register("_efficient_attention_forward", "_efficient_attention_backward")
def _efficient(c: Call) -> OpCost:
    """Layout (batch, sequence, heads, d); custom_mask_type 1 is causal from the top left, 2 from the bottom
    right.
    """
    q, k, v, mask = c.arg("query"), c.arg("key"), c.arg("value"), int(c.arg("custom_mask_type", 0))
    offsets = c.arg("cu_seqlens_q"), c.arg("cu_seqlens_k")
    edges = {"bottom_right": mask == 2, "left": c.arg("window_size")}
    if offsets[0] is None:
        area2 = twice_area(shape(q)[-3], shape(k)[-3], mask != 0, **edges)
    else:
        area2 = _packed_area2(c, q, k, offsets, mask != 0, **edges)
    return _cost(q, k, v, area2, "bshd", "backward" in c.name)


def _flex_area2(block_mask: Any, q: Any, k: Any) -> int:
    """Twice the mean score area per (batch, head): the blocks that the mask keeps, where their number is
    known.

    A BlockMask is (q_len, kv_len, kv_num_blocks, kv_indices, full_kv_num_blocks, ..., q_block, kv_block,
    mask_mod); under fake tensors the numbers are not known and every score counts, as in
    torch.utils.flop_counter.
    """
    rows, cols = shape(q)[-2], shape(k)[-2]
    counts = [block_mask[i] for i in (2, 4) if block_mask and len(block_mask) > 6 and block_mask[i] is not None]
    if not counts or not all(type(n) is torch.Tensor and n.device.type == "cpu" for n in counts):
        return 2 * rows * cols
    block_q, block_k = block_mask[-3], block_mask[-2]
    planes: int = prod(counts[0].shape[:-1])
    kept: int = sum(int(n.sum()) for n in counts) * min(block_q, rows) * min(block_k, cols)
    full: int = 2 * rows * cols
    return min(2 * kept // max(planes, 1), full)


@register("higher_order::flex_attention")
def _flex(c: Call) -> OpCost:
    # (query, key, value, score_mod, block_mask, ...); score_mod and mask_mod are not counted.
    q, k, v = c.args[:3]
    return _cost(q, k, v, _flex_area2(c.args[4], q, k), "bhsd", backward=False)


@register("higher_order::flex_attention_backward")
def _flex_backward(c: Call) -> OpCost:
    # (query, key, value, out, logsumexp, grad_out, grad_logsumexp, fw_graph, joint_graph, block_mask, ...)
    q, k, v = c.args[:3]
    return _cost(q, k, v, _flex_area2(c.args[9], q, k), "bhsd", backward=True)


@register("_native_multi_head_attention")
def _native_mha(c: Call) -> OpCost:
    """Inference-time nn.MultiheadAttention: the projection of q, k and v, attention, the output projection."""
    q, k, width = c.arg("query"), c.arg("key"), c.arg("embed_dim")
    batch, sq, sk = shape(q)[0], shape(q)[1], shape(k)[1]
    return OpCost(_mha_flops(batch, sq, sk, width), "attention", (sq, sk, width // c.arg("num_head")), batch)


def _mha_flops(batch: int, sq: int, sk: int, width: int) -> int:
    projections = 2 * batch * width * width * (sq + 2 * sk + sq)
    return projections + 2 * 2 * batch * sq * sk * width


@register("_transformer_encoder_layer_fwd")
def _encoder_layer(c: Call) -> OpCost:
    """Inference-time nn.TransformerEncoderLayer: attention, two feed-forward products, norms, residuals,
    activation.
    """
    src, width, hidden = c.arg("src"), c.arg("embed_dim"), shape(c.arg("ffn_weight_1"))[0]
    batch, s = shape(src)[0], shape(src)[1]
    flops = _mha_flops(batch, s, s, width) + 2 * 2 * batch * s * width * hidden
    # Norms: 8 per element each (layer_norm with scale and shift); activation and two residual adds.
    flops += batch * s * (2 * 8 * width + 2 * width + hidden)
    return OpCost(flops, "attention", (batch * s, 3 * width, width))
