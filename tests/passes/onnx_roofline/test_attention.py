"""Fused attention of ai.onnx and com.microsoft: 2 s_q s_k (d + d_v) per query head, cut where causal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T

MS = "com.microsoft"
B, S, H, D = 2, 32, 4, 16
PRODUCTS = 4 * B * H * S * S * D


def _qkv(heads: int = H, kv: int = H, length: int = S) -> dict[str, list[int]]:
    return {"q": [B, heads, S, D], "k": [B, kv, length, D], "v": [B, kv, length, D]}


def test_standard(analyse: Any, node: Any) -> None:
    found = analyse([node("Attention", "q k v", "y")], _qkv(), opset=23)
    op = found.op("Attention")
    assert (op.cost.flops, op.cost.kind, op.cost.mnk, op.cost.batch) == (PRODUCTS, "attention", (S, S, D), B * H)
    assert (op.reads, op.writes) == (3 * 4 * B * H * S * D, 4 * B * H * S * D)
    assert found.facts.outputs == (f"y: float32[{B}, {H}, {S}, {D}]",)


def test_causal_halves_and_a_mask_does_not(analyse: Any, node: Any) -> None:
    causal = analyse([node("Attention", "q k v", "y", is_causal=1)], _qkv(), opset=23)
    assert causal.flops() == PRODUCTS // 2
    masked = analyse([node("Attention", "q k v m", "y")], {**_qkv(), "m": [S, S]}, opset=23)
    assert masked.flops() == PRODUCTS


def test_packed_heads_and_gqa(analyse: Any, node: Any) -> None:
    """3-D operands; fewer key heads change the bytes, not the FLOPs."""
    inputs = {"q": [B, S, H * D], "k": [B, S, 2 * D], "v": [B, S, 2 * D]}
    found = analyse([node("Attention", "q k v", "y", q_num_heads=H, kv_num_heads=2)], inputs, opset=23)
    op = found.op("Attention")
    assert op.cost.flops == PRODUCTS
    assert op.reads == 4 * B * S * D * (H + 2 + 2)
    assert found.facts.outputs == (f"y: float32[{B}, {S}, {H * D}]",)


def test_cache_is_joined_and_causal_is_aligned_at_its_end(analyse: Any, node: Any) -> None:
    """One new token sees the whole cache, causal or not."""
    past = 31
    inputs = {n: [B, H, 1, D] for n in "qkv"} | {"pk": [B, H, past, D], "pv": [B, H, past, D]}
    found = analyse([node("Attention", "q k v - pk pv", "y nk nv", is_causal=1)], inputs, opset=23)
    # The area cut through the diagonal's cell: 32 - 1/2 scores.
    assert found.flops() == 2 * B * H * 2 * D * (past + 0.5)
    assert found.facts.outputs[1] == f"nk: float32[{B}, {H}, {past + 1}, {D}]"


def test_window(analyse: Any, node: Any) -> None:
    found = analyse([node("Attention", "q k v", "y", is_causal=1, left_window_size=4)], _qkv(), opset=25)
    assert 0 < found.flops() < PRODUCTS / 4


def test_shapes_flow_past_attention(analyse: Any, node: Any) -> None:
    """ONNX writes no value_info for Attention; what follows must be counted all the same."""
    nodes = [
        node("Attention", "q k v", "a"),
        node("Transpose", "a", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t flat", "r"),
        node("MatMul", "r w", "y"),
    ]
    found = analyse(nodes, _qkv(), {"w": [H * D, 7]}, consts={"flat": np.array([0, 0, -1])}, opset=23)
    assert found.op("MatMul").cost.flops == 2 * B * S * H * D * 7
    assert found.notes == ""


def test_rotary(analyse: Any, node: Any) -> None:
    """(a cos - b sin, a sin + b cos): 3 per rotated element, in either op set."""
    inputs = {"x": [B, H, S, D], "ids": ([B, S], T.INT64)}
    tables = {"c": [64, D // 2], "s": [64, D // 2]}
    standard = analyse([node("RotaryEmbedding", "x c s ids", "y")], inputs, tables, opset=23)
    assert standard.op("RotaryEmbedding").cost.flops == 3 * B * H * S * D
    contrib = analyse([node("RotaryEmbedding", "x ids c s", "y", domain=MS)], inputs, tables)
    assert contrib.op("RotaryEmbedding").cost.flops == 3 * B * H * S * D
    partial = {"c": [64, D // 4], "s": [64, D // 4]}
    half = analyse([node("RotaryEmbedding", "x c s ids", "y", rotary_embedding_dim=D // 2)], inputs, partial, opset=23)
    assert half.op("RotaryEmbedding").cost.flops == 3 * B * H * S * D // 2


def test_onnxruntime_attention(analyse: Any, node: Any) -> None:
    width = H * D
    found = analyse(
        [node("Attention", "x w b", "y", domain=MS, num_heads=H)],
        {"x": [B, S, width]},
        {"w": [width, 3 * width], "b": [3 * width]},
    )
    bias = B * S * 3 * width
    assert found.op("Attention").cost.flops == 2 * B * S * width * 3 * width + bias + PRODUCTS
    assert found.facts.outputs == (f"y: float32[{B}, {S}, {width}]",)


def test_multi_head_attention(analyse: Any, node: Any) -> None:
    inputs = {n: [B, S, H * D] for n in "qkv"}
    plain = analyse([node("MultiHeadAttention", "q k v", "y", domain=MS, num_heads=H)], inputs)
    assert plain.flops() == PRODUCTS
    packed = analyse([node("MultiHeadAttention", "x", "y", domain=MS, num_heads=H)], {"x": [B, S, H, 3, D]})
    assert packed.flops() == PRODUCTS


@pytest.mark.parametrize("rotary", [0, 1])
def test_group_query_attention(analyse: Any, node: Any, rotary: int) -> None:
    """Causal over cache and new tokens; q, k, v packed in the query or apart."""
    past, kv = 16, 2
    cache = {"pk": [B, kv, past, D], "pv": [B, kv, past, D], "lens": ([B], T.INT32), "total": ([], T.INT32)}
    tables = {"c": [64, D // 2], "s": [64, D // 2]}
    attrs = {"num_heads": H, "kv_num_heads": kv, "do_rotary": rotary, "domain": MS}
    names = "pk pv lens total c s"
    apart = analyse(
        [node("GroupQueryAttention", f"q k v {names}", "y nk nv", **attrs)],
        {"q": [B, S, H * D], "k": [B, S, kv * D], "v": [B, S, kv * D], **cache},
        tables,
    )
    packed = analyse(
        [node("GroupQueryAttention", f"q - - {names}", "y nk nv", **attrs)],
        {"q": [B, S, (H + 2 * kv) * D], **cache},
        tables,
    )
    area = S * (past + S) - S * S / 2  # bottom right: all of the cache, half of the new square
    turned = 3 * B * S * D * (H + kv) * rotary
    assert apart.flops() == packed.flops() == 2 * B * H * 2 * D * area + turned
    assert apart.facts.outputs[:2] == (f"y: float32[{B}, {S}, {H * D}]", f"nk: float32[{B}, {kv}, {past + S}, {D}]")


def test_linear_attention_is_one_kernel(analyse: Any, node: Any) -> None:
    """Update and read of the state, 2 d d_v each per token and head; its state never leaves the kernel."""
    inputs = {n: [B, S, H * D] for n in "qkv"}
    attrs = {"q_num_heads": H, "kv_num_heads": H, "update_rule": "linear"}
    found = analyse([node("LinearAttention", "q k v", "y s", **attrs)], inputs, opset=27)
    op = found.op("LinearAttention")
    assert op.cost.flops == 2 * (2 * B * S * H * D * D)
    assert (op.reads, op.writes) == (3 * 4 * B * S * H * D, 4 * (B * S * H * D + B * H * D * D))
