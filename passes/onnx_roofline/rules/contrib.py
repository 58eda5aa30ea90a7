"""com.microsoft attention layers: what onnxruntime's optimiser makes of exported transformers."""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.attention import attend, flat, heads_first, joined
from optpass.passes.onnx_roofline.rules.norm import optional
from optpass.passes.onnx_roofline.rules.registry import MICROSOFT, register


def _split_last(c: Call, x: fx.Node, sizes: list[int]) -> list[fx.Node]:
    parts = tuple(meta_of(x).split_with_sizes(sizes, -1))
    return c.b.parts(c.b.emit("split_with_sizes", x, sizes, -1, out=parts))


def _outputs(c: Call, *found: fx.Node | None) -> Result:
    return [node if c.wants(i) else None for i, node in enumerate(found)][: len(c.specs)]


@register("Attention", domain=MICROSOFT)
def _attention(c: Call) -> Result:
    """One product makes q, k and v of the input, then attention; the cache is (2, batch, heads, s, d)."""
    x, w, heads = c.t(0), c.t(1), int(c.attr("num_heads"))
    width = meta_of(w).shape[-1]
    sizes = [int(s) for s in c.attr("qkv_hidden_sizes", [])] or [width // 3] * 3
    out = torch.empty((*meta_of(x).shape[:-1], width), dtype=meta_of(x).dtype, device="meta")
    product = c.b.emit("matmul", x, w, out=out)
    bias = optional(c, 2)
    q, k, v = _split_last(c, c.b.map("add", product, bias) if bias is not None else product, sizes)
    q, k, v = (heads_first(c, part, heads) for part in (q, k, v))
    past = optional(c, 4)
    if past is not None:
        k, v = joined(c, c.b.select(past, 0, 0), k), joined(c, c.b.select(past, 0, 1), v)
    y = flat(c, attend(c, q, k, v, optional(c, 5), bool(c.attr("unidirectional", 0))))
    cache = c.b.emit("stack", [k, v], out=c.out(1)) if c.wants(1) else None
    return _outputs(c, y, cache)


@register("MultiHeadAttention", domain=MICROSOFT)
def _multi_head(c: Call) -> Result:
    """q, k, v apart, or packed as (batch, s, heads, 3, d), or k and v as (batch, s, heads, 2, d)."""
    heads = int(c.attr("num_heads"))
    q, k, v = _operands(c, heads)
    k, v = joined(c, optional(c, 6), k), joined(c, optional(c, 7), v)
    y = flat(c, attend(c, q, k, v, optional(c, 5), bool(c.attr("unidirectional", 0))))
    return _outputs(c, y, k, v)


def _operands(c: Call, heads: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    query = c.t(0)
    if not c.has(1):
        if meta_of(query).dim() != 5:
            raise NotKnown("it has no key, and its query is not packed")
        q, k, v = (c.b.permute(c.b.select(query, 3, i), [0, 2, 1, 3]) for i in range(3))
        return q, k, v
    bias = optional(c, 3)
    if bias is not None:
        query = c.b.map("add", query, _split_last(c, bias, _thirds(c))[0])
    q, key = heads_first(c, query, heads), c.t(1)
    if meta_of(key).dim() == 5:
        k, v = (c.b.permute(c.b.select(key, 3, i), [0, 2, 1, 3]) for i in range(2))
        return q, k, v
    value = c.t(2)
    if bias is not None and meta_of(key).dim() == 3:
        parts = _split_last(c, bias, _thirds(c))
        key, value = c.b.map("add", key, parts[1]), c.b.map("add", value, parts[2])
    return q, heads_first(c, key, heads), heads_first(c, value, heads)


def _thirds(c: Call) -> list[int]:
    """Widths of the parts of the bias: those of q and k, the rest v's."""
    width = c.shape(0)[-1]
    return [width, width, c.shape(3)[-1] - 2 * width]


@register("GroupQueryAttention", domain=MICROSOFT)
def _group_query(c: Call) -> Result:
    """Causal from the bottom right; q, k and v may be packed in the query, and rotated inside (do_rotary)."""
    heads, kv_heads = int(c.attr("num_heads")), int(c.attr("kv_num_heads"))
    query = c.t(0)
    if c.has(1):
        q, k, v = heads_first(c, query, heads), heads_first(c, c.t(1), kv_heads), heads_first(c, c.t(2), kv_heads)
    else:
        width = meta_of(query).shape[-1] // (heads + 2 * kv_heads)
        parts = _split_last(c, query, [heads * width, kv_heads * width, kv_heads * width])
        q, k, v = (heads_first(c, p, n) for p, n in zip(parts, (heads, kv_heads, kv_heads), strict=True))
    if c.attr("do_rotary", 0):
        q, k = _rotated(c, q), _rotated(c, k)
    total = c.const(6)
    length = int(total.reshape(-1)[0]) if total is not None else None
    k, v = joined(c, optional(c, 3), k, length), joined(c, optional(c, 4), v, length)
    y = flat(c, attend(c, q, k, v, optional(c, 10), True, left=c.attr("local_window_size", -1)))
    return _outputs(c, y, k, v)


def _rotated(c: Call, x: fx.Node) -> fx.Node:
    """x cos + rotate(x) sin: 3 operations per element, as the RotaryEmbedding op."""
    cos, sin = c.t(7), c.t(8)
    table = torch.empty((1, 1, meta_of(x).shape[-2], 2 * meta_of(cos).shape[-1]), dtype=meta_of(x).dtype, device="meta")
    tables = [c.b.emit("index_select", t, 0, None, out=table) for t in (cos, sin)]
    width = min(table.shape[-1], meta_of(x).shape[-1])
    part = c.b.slice(x, -1, 0, width)
    turned = c.b.map("add", c.b.map("mul", part, tables[0]), c.b.map("mul", part, tables[1]))
    whole = torch.empty(meta_of(x).shape, dtype=meta_of(x).dtype, device="meta")
    return turned if width == meta_of(x).shape[-1] else c.b.emit("cat", [turned, x], -1, out=whole)
