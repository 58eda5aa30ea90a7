"""Conformance of attention in every form: causal, masked, GQA, windows, packed, flex, and their backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import rand

from optpass.passes.roofline.flops import op_cost
from optpass.passes.roofline.flops.attention import twice_area

aten = torch.ops.aten
B, H, S, D = 2, 4, 16, 8
#: QK^T and PV: 2 products of S x S x D per (batch, head)
FULL = 2 * 2 * B * H * S * S * D


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


QKV = (rand(B, H, S, D), rand(B, H, S, D), rand(B, H, S, D))
MASK = rand(S, S)


def test_cpu_flash_is_counted(trace: Any) -> None:
    traced = trace(F.scaled_dot_product_attention, *QKV)
    assert traced.named("flash_attention_for_cpu"), "the CPU kernel was expected in this trace"
    assert sum(c.flops for c in traced.of("attention")) == FULL


def test_causal_is_half(trace: Any) -> None:
    traced = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *QKV)
    assert sum(c.flops for c in traced.of("attention")) == FULL // 2


def test_dense_mask_skips_nothing(trace: Any) -> None:
    traced = trace(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *QKV, MASK)
    assert sum(c.flops for c in traced.of("attention")) == FULL


def test_gqa_counts_query_heads() -> None:
    """2 key heads serve 4 query heads: every query head still meets all keys."""
    q, kv = meta(B, H, S, D), meta(B, 2, S, D)
    cost = op_cost(aten.scaled_dot_product_attention.default, (q, kv, kv), {"enable_gqa": True}, q)
    assert cost is not None and cost.flops == FULL and cost.batch == B * H


def test_gqa_traced(trace: Any) -> None:
    """Where make_fx repeats the key heads first, the products stay the same."""
    q, k, v = rand(B, H, S, D), rand(B, 2, S, D), rand(B, 2, S, D)
    traced = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
    assert not traced.unknown
    assert sum(c.flops for c in traced.of("attention") + traced.of("matmul")) == FULL


@pytest.mark.parametrize("causal", [False, True])
def test_cpu_flash_backward(causal: bool, trace_backward: Any) -> None:
    """Forward 2 products; backward 5: QK^T again, dP, dV, dQ, dK."""
    traced = trace_backward(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), *QKV)
    assert not traced.unknown
    forward = FULL // 2 if causal else FULL
    assert sorted(c.flops for c in traced.of("attention")) == [forward, forward * 5 // 2]


def test_math_form_backward_is_twice_forward(trace_backward: Any) -> None:
    """Written out: two batched products forward, four backward."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    traced = trace_backward(attention, *QKV)
    assert sum(c.flops for c in traced.of("matmul")) == 3 * FULL


FUSED = [
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("causal", [False, True])
def test_every_fused_kernel(name: str, causal: bool) -> None:
    """Value width 12 differs from key width 8: 2 S_q S_k (8 + 12) forward, 2 S_q S_k (3*8 + 2*12) backward."""
    q, k, v = meta(B, H, S, D), meta(B, H, S, D), meta(B, H, S, 12)
    half = 2 if causal else 1
    forward = getattr(aten, name).default
    needed = {a.name for a in forward._schema.arguments}
    kwargs: dict[str, Any] = {"is_causal": causal}
    kwargs |= {n: v for n, v in {"attn_bias": None, "compute_log_sumexp": True}.items() if n in needed}
    cost = op_cost(forward, (q, k, v), kwargs, (meta(B, H, S, 12),))
    assert cost is not None and cost.flops == 2 * B * H * S * S * (8 + 12) // half
    grads = {"grad_out": meta(B, H, S, 12), "grad_out_": meta(B, H, S, 12), "query": q, "key": k, "value": v}
    backward = getattr(aten, name + "_backward").default
    given = {a.name: grads[a.name] for a in backward._schema.arguments if a.name in grads}
    cost = op_cost(backward, (), given | {"is_causal": causal}, (q, k, v))
    assert cost is not None and cost.flops == 2 * B * H * S * S * (3 * 8 + 2 * 12) // half


def test_math_op_computes_every_score() -> None:
    q = meta(B, H, S, D)
    cost = op_cost(aten._scaled_dot_product_attention_math.default, (q, q, q, None, 0.0, True), {}, (q, q))
    assert cost is not None and cost.flops == FULL


@pytest.mark.parametrize(
    ("sq", "sk", "bottom_right", "expected"),
    [
        (8, 8, False, 8 * 8),  # twice the triangle s^2 / 2
        (4, 10, False, 4 * 4),  # upper left: rows reach column 4 at most
        (10, 4, False, 4 * 4 + 2 * 6 * 4),  # a triangle of 4, then 6 full rows of 4
        (4, 10, True, 2 * 4 * 10 - 4 * 4),  # bottom right: all but the upper right triangle of 4
        (10, 4, True, 4 * 4),  # the first 6 rows see nothing
        (8, 8, True, 8 * 8),
    ],
)
def test_causal_area(sq: int, sk: int, bottom_right: bool, expected: int) -> None:
    assert twice_area(sq, sk, True, bottom_right) == expected


def test_window_area_tends_to_the_count_of_kept_scores() -> None:
    """A window of w to the left of a causal diagonal keeps, per row, min(i, w) + half the diagonal's cell."""
    s, w = 512, 64
    kept = sum(min(i, w) + 0.5 for i in range(s))
    assert twice_area(s, s, True, left=w) / 2 == pytest.approx(kept, rel=0.01)
    assert twice_area(s, s, True, left=s) == twice_area(s, s, True)
    assert twice_area(s, s, False, left=0, right=0) == 0


def test_flash_forward_layout_and_alignment() -> None:
    """(batch, sequence, heads, d); causal with more keys than queries is aligned bottom right."""
    q, kv = meta(B, 4, H, D), meta(B, 10, H, D)
    args = (q, kv, kv, None, None, 4, 10, 0.0, True, False)
    cost = op_cost(aten._flash_attention_forward.default, args, {}, (q,))
    assert cost is not None and cost.flops == B * H * (2 * 4 * 10 - 4 * 4) * 2 * D


def test_packed_sequences_exact_from_real_offsets() -> None:
    """Lengths 3, 5, 8: the sum of squares, not the square of the total."""
    q, offsets = meta(16, H, D), torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    args = (q, q, q, offsets, offsets, 8, 8, 0.0, False, False)
    cost = op_cost(aten._flash_attention_forward.default, args, {}, (q,))
    assert cost is not None and cost.flops == 2 * 2 * H * (3 * 3 + 5 * 5 + 8 * 8) * D


def test_packed_sequences_of_unknown_length_are_bounded() -> None:
    q, offsets = meta(16, H, D), meta(4, dtype=torch.int32)
    args = (q, q, q, offsets, offsets, 8, 8, 0.0, False, False)
    cost = op_cost(aten._flash_attention_forward.default, args, {}, (q,))
    assert cost is not None and cost.flops == 2 * 2 * H * (16 * 8) * D  # 16 queries against at most 8 keys


def test_efficient_attention_mask_types() -> None:
    q, kv = meta(B, 4, H, D), meta(B, 10, H, D)
    for mask, area2 in ((0, 2 * 40), (1, 16), (2, 2 * 40 - 16)):
        cost = op_cost(
            aten._efficient_attention_forward.default, (q, kv, kv, None, None, None, 4, 10, 0.0, mask), {}, (q,)
        )
        assert cost is not None and cost.flops == B * H * area2 * 2 * D


def _block_mask(kept: torch.Tensor, full: torch.Tensor | None) -> tuple[Any, ...]:
    indices = torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    return (S, S, kept, indices, full, indices, *[None] * 4, 4, 4, None)


def test_flex_counts_every_score_unless_blocks_are_known() -> None:
    q = meta(B, H, S, D)
    flex, backward = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
    unknown = _block_mask(meta(1, 1, 4, dtype=torch.int32), None)
    cost = op_cost(flex, (q, q, q, None, unknown, 1.0, {}), {}, (q, q, q))
    assert cost is not None and cost.flops == FULL
    # 4 x 4 blocks of 4 x 4: 1, 1, 2, 2 partial and 0, 1, 1, 2 full ones are kept: 10 of 16
    kept = torch.tensor([[[1, 1, 2, 2]]], dtype=torch.int32)
    full = torch.tensor([[[0, 1, 1, 2]]], dtype=torch.int32)
    known_mask = _block_mask(kept, full)
    cost = op_cost(flex, (q, q, q, None, known_mask, 1.0, {}), {}, (q, q, q))
    assert cost is not None and cost.flops == 2 * 2 * B * H * (10 * 4 * 4) * D
    cost = op_cost(backward, (q, q, q, q, q, q, None, None, None, known_mask, 1.0, {}), {}, (q, q, q))
    assert cost is not None and cost.flops == 2 * 5 * B * H * (10 * 4 * 4) * D


def test_hand_written_attention_equals_the_fused_products(trace: Any) -> None:
    """Products of the eager spelling equal the fused op's count; what the fused op leaves out is softmax and scale."""

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * D**-0.5, -1) @ v

    traced = trace(eager, *QKV)
    scores = B * H * S * S
    assert sum(c.flops for c in traced.of("matmul")) == FULL
    assert traced.flops == FULL + scores * (1 + 5)  # scale; max, subtract, exp, sum, divide
    assert traced.transcendental == scores
