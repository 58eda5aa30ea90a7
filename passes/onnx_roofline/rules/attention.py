"""Fused attention, rotary embeddings, linear attention: ai.onnx and com.microsoft.

Products only, as the project's convention says: 2 s_q s_k (d + d_v) per query head, cut where causal.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.norm import optional
from optpass.passes.onnx_roofline.rules.registry import MICROSOFT, register


def heads_first(c: Call, x: fx.Node, heads: int) -> fx.Node:
    """(batch, sequence, heads * d) as (batch, heads, sequence, d); rank 4 as it is."""
    shape = meta_of(x).shape
    if len(shape) == 4:
        return x
    if len(shape) != 3 or heads < 1 or shape[2] % heads:
        raise NotKnown(f"{list(shape)} does not split into {heads} heads")
    return c.b.permute(c.b.reshape(x, (shape[0], shape[1], heads, shape[2] // heads)), [0, 2, 1, 3])


def joined(c: Call, past: fx.Node | None, x: fx.Node, length: int | None = None) -> fx.Node:
    """The cache with what is new: joined along the sequence, or of `length` places where it is a buffer."""
    if past is None:
        return x
    before, new = meta_of(past), meta_of(x)
    total = before.shape[-2] + new.shape[-2] if length is None else length
    out = torch.empty((*new.shape[:-2], total, new.shape[-1]), dtype=new.dtype, device="meta")
    return c.b.emit("cat", [past, x], -2, out=out)


def attend(
    c: Call, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, causal: bool, left: int = -1, right: int = -1,
    bottom_right: bool = True,
) -> fx.Node:  # fmt: skip
    """One attention kernel on (batch, heads, sequence, d).

    Causal and windows are aligned bottom right, which is FlashAttention's op; top left is SDPA's.
    """
    sizes = meta_of(q)
    out = torch.empty((*sizes.shape[:-1], meta_of(v).shape[-1]), dtype=sizes.dtype, device="meta")
    windowed = left >= 0 or right >= 0
    if not windowed and (mask is not None or not causal or not bottom_right):
        # A mask passed as a tensor skips nothing; is_causal does.
        return c.b.emit("scaled_dot_product_attention", q, k, v, mask, 0.0, causal, out=out)
    packed = [c.b.permute(x, [0, 2, 1, 3]) for x in (q, k, v)]
    window = {"window_size_left": left, "window_size_right": right} if windowed else {}
    extra = {"attn_mask": mask} if mask is not None else {}
    lengths = (meta_of(q).shape[-2], meta_of(k).shape[-2])
    flash = c.b.emit(
        "_flash_attention_forward", *packed, None, None, *lengths, 0.0, causal, False, **window, **extra,
        out=out.permute(0, 2, 1, 3),
    )  # fmt: skip
    return c.b.permute(flash, [0, 2, 1, 3])


def flat(c: Call, y: fx.Node) -> fx.Node:
    """(batch, heads, sequence, d) as output 0 has it."""
    out = c.out()
    if out.dim() == 4:
        return y
    return c.b.reshape(c.b.permute(y, [0, 2, 1, 3]), tuple(out.shape))


def _causal_offset(c: Call) -> bool:
    """Whether causal is aligned bottom right: with a cache, and always since opset 25."""
    return c.has(4) or c.version >= 25


@register("Attention")
def _attention(c: Call) -> Result:
    """ai.onnx (opset 23): 3-D or 4-D operands, cache, GQA; softcap and softmax are inside the kernel."""
    q = heads_first(c, c.t(0), c.attr("q_num_heads", 0))
    k = heads_first(c, c.t(1), c.attr("kv_num_heads", 0))
    v = heads_first(c, c.t(2), c.attr("kv_num_heads", 0))
    k, v = joined(c, optional(c, 4), k), joined(c, optional(c, 5), v)
    left, right = c.attr("left_window_size", -1), c.attr("right_window_size", -1)
    causal = bool(c.attr("is_causal", 0))
    y = attend(c, q, k, v, optional(c, 3), causal, left, right, _causal_offset(c))
    scores = c.b.zeros(tuple(c.out(3).shape), c.out(3).dtype) if c.wants(3) else None
    return [flat(c, y), k if c.wants(1) else None, v if c.wants(2) else None, scores][: len(c.specs)]


@register("FlexAttention", domain="ai.onnx.preview")
def _flex(c: Call) -> Result:
    """score_mod and prob_mod are not counted, as for torch's flex_attention."""
    return attend(c, c.t(0), c.t(1), c.t(2), None, False)


@register("RotaryEmbedding")
@register("RotaryEmbedding", domain=MICROSOFT)
def _rotary(c: Call) -> Result:
    """Each pair (a, b) becomes (a cos - b sin, a sin + b cos): 3 operations per rotated element."""
    contrib = c.domain == MICROSOFT
    x, cos, sin = c.t(0), c.t(2 if contrib else 1), c.t(3 if contrib else 2)
    shape, half = meta_of(x).shape, meta_of(cos).shape[-1]
    heads = int(c.attr("num_heads", 0)) or (shape[1] if len(shape) == 4 else shape[-1] // max(2 * half, 1))
    split = heads_first(c, x, heads)
    batch, _, length, width = meta_of(split).shape
    if 2 * half > width:
        raise NotKnown(f"{2 * half} rotated elements do not fit a head of {width}")
    tables = []
    for table in (cos, sin):
        rows = torch.empty((batch, 1, length, half), dtype=meta_of(x).dtype, device="meta")
        tables.append(c.b.emit("index_select", table, 0, optional(c, 1 if contrib else 3), out=rows))
    a, b = (c.b.slice(split, -1, s, s + half) for s in (0, half))
    turned = [
        c.b.map(name, c.b.map("mul", a, tables[i]), c.b.map("mul", b, tables[1 - i]))
        for i, name in enumerate(("sub", "add"))
    ]
    rest = [c.b.slice(split, -1, 2 * half, width)] if width > 2 * half else []
    whole = c.b.emit(
        "cat",
        [*turned, *rest],
        -1,
        out=torch.empty((batch, heads, length, width), dtype=meta_of(x).dtype, device="meta"),
    )
    return flat(c, whole)


@register("LinearAttention")
def _linear_attention(c: Call) -> Result:
    """The recurrence, token by token: an update of the state k v^T and a read q^T S, 2 d d_v each.

    Decay multiplies the state (exp of the gate first); the delta rule reads S^T k and corrects by
    beta (v - that) before the update.
    """
    heads, kv_heads = int(c.attr("q_num_heads")), int(c.attr("kv_num_heads"))
    q, k, v = heads_first(c, c.t(0), heads), heads_first(c, c.t(1), kv_heads), heads_first(c, c.t(2), kv_heads)
    batch, _, length, d = meta_of(q).shape
    dv, dtype, rule = meta_of(v).shape[-1], meta_of(q).dtype, c.attr("update_rule", "gated_delta")
    steps = torch.empty((batch, kv_heads, length, d, dv), dtype=dtype, device="meta")
    state = optional(c, 3) or c.b.zeros((batch, kv_heads, d, dv), dtype)
    if "gated" in rule:
        c.b.emit("mul", state, c.b.map("exp", c.t(4)), out=steps)
    if "delta" in rule:
        read = c.b.emit("bmm", *_as_bmm(c, k, dv), out=_matrix(prod((batch, kv_heads, length)), 1, dv, dtype))
        delta = c.b.map("sub", v, c.b.reshape(read, tuple(meta_of(v).shape)))
        rate = heads_first(c, c.t(5), kv_heads if c.shape(5)[-1] == kv_heads else 1)
        v = c.b.map("mul", delta, rate)
    rows = batch * kv_heads * length
    update = [c.b.reshape(k, (rows, d, 1)), c.b.reshape(v, (rows, 1, dv))]
    c.b.emit("bmm", *update, out=_matrix(rows, d, dv, dtype))
    c.b.emit("bmm", *_as_bmm(c, q, dv), out=_matrix(batch * heads * length, 1, dv, dtype))
    kernel = c.b.collapse(c.outs())
    return c.b.parts_or_none(kernel)


def _as_bmm(c: Call, x: fx.Node, columns: int) -> tuple[fx.Node, fx.Node]:
    """Rows of x, each against a d x columns state of its own."""
    *lead, d = meta_of(x).shape
    rows = prod(lead)
    return c.b.reshape(x, (rows, 1, d)), c.b.zeros((rows, d, columns), meta_of(x).dtype)


def _matrix(batch: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((batch, rows, columns), dtype=dtype, device="meta")
