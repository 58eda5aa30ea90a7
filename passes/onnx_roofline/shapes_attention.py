"""Sizes of the results of attention ops, of ai.onnx (whose inference leaves them out in places) and com.microsoft."""

from __future__ import annotations

from optpass.passes.onnx_roofline.shapes import Sizes, register_sizes
from optpass.passes.onnx_roofline.value import Spec


@register_sizes("Attention")
def _attention(s: Sizes) -> list[Spec]:
    x, w, past = s.shape(0), s.shape(1), s.shape(4)
    if not x or not w:
        return [Spec(s.elem(), None)] * 2
    heads = int(s.attrs["num_heads"])
    sizes = s.attrs.get("qkv_hidden_sizes") or [w[-1] // 3] * 3
    before = past[3] if past else 0
    return [
        Spec(s.elem(), (*x[:-1], int(sizes[2]))),
        Spec(s.elem(), (2, x[0], heads, before + x[1], int(sizes[1]) // heads)),
    ]


@register_sizes("MultiHeadAttention")
def _multi_head(s: Sizes) -> list[Spec]:
    q, k, v, past = s.shape(0), s.shape(1), s.shape(2), s.shape(6)
    heads = int(s.attrs["num_heads"])
    if not q:
        return [Spec(s.elem(), None)] * 3
    d = q[-1] if len(q) == 5 else q[-1] // heads
    dv = v[-1] // (heads if len(v) == 3 else 1) if v else d
    length = (k[-2] if len(k) == 4 else k[1]) if k else q[1]
    total = length + (past[2] if past else 0)
    present = [Spec(s.elem(), (q[0], heads, total, n)) for n in (d, dv)]
    return [Spec(s.elem(), (q[0], q[1], heads * dv)), *present]


@register_sizes("GroupQueryAttention")
def _group_query(s: Sizes) -> list[Spec]:
    q, k, past = s.shape(0), s.shape(1), s.shape(3)
    heads, kv_heads = int(s.attrs["num_heads"]), int(s.attrs["kv_num_heads"])
    if not q:
        return [Spec(s.elem(), None)] * 3
    d = q[-1] // heads if k else q[-1] // (heads + 2 * kv_heads)
    total = s.const(6) or q[1] + (past[2] if past else 0)
    present = Spec(s.elem(), (q[0], kv_heads, total, d))
    return [Spec(s.elem(), (q[0], q[1], heads * d)), present, present]


@register_sizes("Attention", domain="")
def _standard_attention(s: Sizes) -> list[Spec]:
    q, k, v, past = s.shape(0), s.shape(1), s.shape(2), s.shape(4)
    if not q or not k or not v:
        return [Spec(s.elem(), None)] * 4
    heads, kv_heads = int(s.attrs.get("q_num_heads", q[1])), int(s.attrs.get("kv_num_heads", k[1]))
    packed = len(q) == 3
    d, dv = (k[-1] // kv_heads, v[-1] // kv_heads) if packed else (k[-1], v[-1])
    length = (k[1] if packed else k[2]) + (past[2] if past else 0)
    rows = q[1] if packed else q[2]
    y = (q[0], rows, heads * dv) if packed else (q[0], heads, rows, dv)
    return [
        Spec(s.elem(), y),
        Spec(s.elem(1), (q[0], kv_heads, length, d)),
        Spec(s.elem(2), (q[0], kv_heads, length, dv)),
        Spec(s.elem(), (q[0], heads, rows, length)),
    ]
