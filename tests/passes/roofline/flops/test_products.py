"""Conformance of matrix products, einsum, convolutions and RNNs against hand-derived counts.

Every expected value is an explicit expression; none comes from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import rand
from torch.utils.flop_counter import FlopCounterMode

from optpass.passes.roofline.flops import op_cost

aten = torch.ops.aten
M, K, N, B = 5, 7, 11, 3

FORWARD: list[tuple[str, Callable[..., Any], tuple[Any, ...], float]] = [
    # 2MNK: M*N dot products of K multiply-adds
    ("mm", torch.mm, (rand(M, K), rand(K, N)), 2 * M * N * K),
    ("mm_complex", torch.mm, (rand(M, K) + 0j, rand(K, N) + 0j), 8 * M * N * K),  # a complex multiply-add is 8
    ("addmm", torch.addmm, (rand(N), rand(M, K), rand(K, N)), 2 * M * N * K),  # bias: epilogue
    ("bmm", torch.bmm, (rand(B, M, K), rand(B, K, N)), 2 * B * M * N * K),
    ("baddbmm", torch.baddbmm, (rand(B, M, N), rand(B, M, K), rand(B, K, N)), 2 * B * M * N * K),
    ("addbmm", torch.addbmm, (rand(M, N), rand(B, M, K), rand(B, K, N)), 2 * B * M * N * K),
    ("mv", torch.mv, (rand(M, K), rand(K)), 2 * M * K),
    ("addmv", torch.addmv, (rand(M), rand(M, K), rand(K)), 2 * M * K),
    ("dot", torch.dot, (rand(K), rand(K)), 2 * K),
    ("vdot", torch.vdot, (rand(K), rand(K)), 2 * K),
    ("outer", torch.outer, (rand(M), rand(N)), M * N),  # a product per output, nothing summed
    ("addr", torch.addr, (rand(M, N), rand(M), rand(N)), 2 * M * N),  # rank-1 update
    ("linear", F.linear, (rand(B, M, K), rand(N, K), rand(N)), 2 * B * M * N * K),
    ("matmul_broadcast", torch.matmul, (rand(2, 1, M, K), rand(B, K, N)), 2 * (2 * B) * M * N * K),
    (
        "int_mm",
        torch._int_mm,
        (torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
        2 * 32 * 8 * 16,
    ),
    # attention scores by einsum: for each of B*H pairs, M x N dots of K
    (
        "einsum_bhqd_bhkd",
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        (rand(2, B, M, K), rand(2, B, N, K)),
        2 * (2 * B) * M * N * K,
    ),
    ("einsum_hadamard", lambda a, b: torch.einsum("ij,ij->ij", a, b), (rand(M, N), rand(M, N)), M * N),
    # bilinear with out O: ATen's _trilinear, 3 (two products, an add) per (row, o, i, j)
    ("bilinear", F.bilinear, (rand(B, M), rand(B, K), rand(N, M, K)), 3 * B * N * M * K),
    # conv: out = 8 - 3 + 1 = 6 positions; 2 * (B*N*6 outputs) * (K*3 taps)
    ("conv1d", F.conv1d, (rand(B, K, 8), rand(N, K, 3)), 2 * (B * N * 6) * (K * 3)),
    # padding 1 keeps 8 x 8; padded taps count
    (
        "conv2d_padded",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (rand(B, K, 8, 8), rand(N, K, 3, 3), rand(N)),
        2 * (B * N * 64) * (K * 9),
    ),
    # stride 2, dilation 2: (9 - 2*(3-1) - 1) // 2 + 1 = 3
    (
        "conv2d_strided_dilated",
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2),
        (rand(B, K, 9, 9), rand(N, K, 3, 3)),
        2 * (B * N * 9) * (K * 9),
    ),
    ("conv3d", F.conv3d, (rand(B, K, 4, 5, 6), rand(N, K, 2, 2, 2)), 2 * (B * N * 3 * 4 * 5) * (K * 8)),
    # depthwise: one input channel per output
    (
        "conv2d_depthwise",
        lambda x, w: F.conv2d(x, w, groups=6),
        (rand(B, 6, 8, 8), rand(6, 1, 3, 3)),
        2 * (B * 6 * 36) * 9,
    ),
    (
        "conv2d_grouped",
        lambda x, w: F.conv2d(x, w, groups=3),
        (rand(B, 6, 8, 8), rand(12, 2, 3, 3)),
        2 * (B * 12 * 36) * (2 * 9),
    ),
    # transposed: each of the B*K*16 inputs is multiplied into N * 9 outputs
    (
        "conv_transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (rand(B, K, 4, 4), rand(K, N, 3, 3)),
        2 * (B * K * 16) * (N * 9),
    ),
    (
        "conv_transpose1d_grouped",
        lambda x, w: F.conv_transpose1d(x, w, groups=2),
        (rand(B, 4, 5), rand(4, 3, 3)),
        2 * (B * 4 * 5) * (3 * 3),
    ),
    ("conv_tbc", torch.conv_tbc, (rand(8, B, K), rand(3, K, N), rand(N)), 2 * (6 * B * N) * (K * 3)),
]

BACKWARD: list[tuple[str, Callable[..., Any], tuple[Any, ...], float]] = [
    # dA = dC B^T and dB = A^T dC: two products of the same size
    ("mm", torch.mm, (rand(M, K), rand(K, N)), 3 * 2 * M * N * K),
    # the same, and the bias gradient sums M*N elements
    ("addmm", torch.addmm, (rand(N), rand(M, K), rand(K, N)), 3 * 2 * M * N * K + M * N),
    ("bmm", torch.bmm, (rand(B, M, K), rand(B, K, N)), 3 * 2 * B * M * N * K),
    ("baddbmm", torch.baddbmm, (rand(B, M, N), rand(B, M, K), rand(B, K, N)), 3 * 2 * B * M * N * K),
    # dx = A^T dy 2MK; dA = dy x^T is an outer product: M*K multiplications
    ("mv", torch.mv, (rand(M, K), rand(K)), 2 * M * K + 2 * M * K + M * K),
    # d = grad * other for either side: a scalar times a vector, K each
    ("dot", torch.dot, (rand(K), rand(K)), 2 * K + K + K),
    ("linear", F.linear, (rand(B, M, K), rand(N, K), rand(N)), 3 * 2 * B * M * N * K + B * M * N),
    ("einsum", lambda a, b: torch.einsum("bqd,bkd->bqk", a, b), (rand(B, M, K), rand(B, N, K)), 3 * 2 * B * M * N * K),
    ("conv1d", F.conv1d, (rand(B, K, 8), rand(N, K, 3)), 3 * 2 * (B * N * 6) * (K * 3)),
    # and the bias gradient sums the B*N*64 output gradients
    (
        "conv2d_bias",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (rand(B, K, 8, 8), rand(N, K, 3, 3), rand(N)),
        3 * 2 * (B * N * 64) * (K * 9) + B * N * 64,
    ),
    ("conv3d", F.conv3d, (rand(B, K, 4, 5, 6), rand(N, K, 2, 2, 2)), 3 * 2 * (B * N * 60) * (K * 8)),
    (
        "conv2d_depthwise",
        lambda x, w: F.conv2d(x, w, groups=6),
        (rand(B, 6, 8, 8), rand(6, 1, 3, 3)),
        3 * 2 * (B * 6 * 36) * 9,
    ),
    (
        "conv2d_grouped",
        lambda x, w: F.conv2d(x, w, groups=3),
        (rand(B, 6, 8, 8), rand(12, 2, 3, 3)),
        3 * 2 * (B * 12 * 36) * (2 * 9),
    ),
    (
        "conv_transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (rand(B, K, 4, 4), rand(K, N, 3, 3)),
        3 * 2 * (B * K * 16) * (N * 9),
    ),
]


@pytest.mark.parametrize(("name", "fn", "inputs", "expected"), FORWARD, ids=[r[0] for r in FORWARD])
def test_forward(name: str, fn: Any, inputs: Any, expected: float, trace: Any) -> None:
    traced = trace(fn, *inputs)
    assert not traced.unknown
    assert traced.flops == expected


@pytest.mark.parametrize(("name", "fn", "inputs", "expected"), BACKWARD, ids=[r[0] for r in BACKWARD])
def test_backward(name: str, fn: Any, inputs: Any, expected: float, trace_backward: Any) -> None:
    traced = trace_backward(fn, *inputs)
    assert not traced.unknown
    assert traced.flops == expected


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


FP8 = torch.float8_e4m3fn
DIRECT: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], Any, float]] = [
    (
        "scaled_mm",
        aten._scaled_mm.default,
        (meta(32, 64, dtype=FP8), meta(64, 16, dtype=FP8), meta(1), meta(1)),
        {},
        meta(32, 16),
        2 * 32 * 16 * 64,
    ),
    # 4 groups share the 40 rows: each row meets one K x N matrix
    (
        "grouped_mm_2d_3d",
        aten._grouped_mm.default,
        (meta(40, 8), meta(4, 8, 6), meta(4, dtype=torch.int32)),
        {},
        meta(40, 6),
        2 * 40 * 6 * 8,
    ),
    # K is split among the groups: each group its own M x N, multiply-adds over all K
    (
        "grouped_mm_2d_2d",
        aten._grouped_mm.default,
        (meta(8, 40), meta(40, 6), meta(4, dtype=torch.int32)),
        {},
        meta(4, 8, 6),
        2 * 8 * 6 * 40,
    ),
    (
        "grouped_mm_3d_2d",
        aten._grouped_mm.default,
        (meta(4, 8, 5), meta(5, 12), meta(4, dtype=torch.int32)),
        {},
        meta(8, 12),
        2 * 8 * 12 * 5,
    ),
    (
        "int8_weight",
        aten._weight_int8pack_mm.default,
        (meta(M, K), meta(N, K, dtype=torch.int8), meta(N)),
        {},
        meta(M, N),
        2 * M * N * K,
    ),
    (
        "einsum_packet_three",
        aten.einsum.default,
        ("ij,jk,kl->il", [meta(2, 3), meta(3, 5), meta(5, 7)]),
        {},
        meta(2, 7),
        2 * 2 * 3 * 5 + 2 * 2 * 5 * 7,
    ),
    (
        "einsum_path",
        aten.einsum.default,
        ("ij,jk,kl->il", [meta(2, 3), meta(3, 5), meta(5, 7)]),
        {"path": [1, 2, 0, 1]},
        meta(2, 7),
        2 * 3 * 5 * 7 + 2 * 2 * 3 * 7,
    ),
    (
        "einsum_ellipsis",
        torch.einsum,
        ("...ij,...jk", meta(4, 2, 3), meta(4, 3, 5)),
        {},
        meta(4, 2, 5),
        2 * 4 * 2 * 3 * 5,
    ),
    ("einsum_trace", aten.einsum.default, ("ii->", [meta(6, 6)]), {}, meta(), 6),
    (
        "multi_dot",
        aten.linalg_multi_dot.default,
        ([meta(10, 100), meta(100, 5), meta(5, 50)],),
        {},
        meta(10, 50),
        2 * 10 * 100 * 5 + 2 * 10 * 5 * 50,
    ),
    # grad of the input only; grad of weight and bias only
    (
        "conv_backward_input",
        aten.convolution_backward.default,
        (meta(2, 4, 6), meta(2, 3, 8), meta(4, 3, 3), [4], [1], [0], [1], False, [0], 1, [True, False, False]),
        {},
        (meta(2, 3, 8), None, None),
        2 * (2 * 4 * 6) * (3 * 3),
    ),
    (
        "conv_backward_weight_bias",
        aten.convolution_backward.default,
        (meta(2, 4, 6), meta(2, 3, 8), meta(4, 3, 3), [4], [1], [0], [1], False, [0], 1, [False, True, True]),
        {},
        (None, meta(4, 3, 3), meta(4)),
        2 * (2 * 4 * 6) * (3 * 3) + 2 * 4 * 6,
    ),
    (
        "conv_depthwise2d_no_groups_argument",
        aten._conv_depthwise2d.default,
        (meta(2, 6, 8, 8), meta(6, 1, 3, 3), [3, 3], None, [1, 1], [0, 0], [1, 1]),
        {},
        meta(2, 6, 6, 6),
        2 * (2 * 6 * 36) * 9,
    ),
    (
        "linear_backward",
        aten.linear_backward.default,
        (meta(B, M, K), meta(B, M, N), meta(N, K), [True, True, True]),
        {},
        (meta(B, M, K), meta(N, K), meta(N)),
        2 * 2 * B * M * N * K + B * M * N,
    ),
]


@pytest.mark.parametrize(("name", "target", "args", "kwargs", "out", "expected"), DIRECT, ids=[r[0] for r in DIRECT])
def test_ops_that_no_cpu_trace_reaches(
    name: str, target: Any, args: Any, kwargs: Any, out: Any, expected: float
) -> None:
    cost = op_cost(target, args, kwargs, out)
    assert cost is not None and cost.flops == expected


def test_fp4_elements_hold_two_numbers() -> None:
    fp4 = getattr(torch, "float4_e2m1fn_x2", None)
    if fp4 is None:
        pytest.skip("this torch has no packed fp4 dtype")
    args = (meta(32, 64, dtype=fp4), meta(64, 16, dtype=fp4), meta(1), meta(1))
    cost = op_cost(aten._scaled_mm.default, args, {}, meta(32, 16))
    assert cost is not None and cost.flops == 2 * 32 * 16 * 128
    assert cost.mnk == (32, 16, 128)


def test_sizes_for_alignment() -> None:
    """M, N, K of the implicit product, and the number of products."""
    cost = op_cost(aten.bmm.default, (meta(B, M, K), meta(B, K, N)), {}, meta(B, M, N))
    assert cost is not None and (cost.mnk, cost.batch) == ((M, N, K), B)
    # convolution as an implicit product: rows N*H*W, columns C_out / g, K = C_in / g * taps, one per group
    args = (meta(2, 8, 10, 10), meta(12, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2)
    cost = op_cost(aten.convolution.default, args, {}, meta(2, 12, 8, 8))
    assert cost is not None and (cost.mnk, cost.batch) == ((2 * 64, 6, 4 * 9), 2)
    cost = op_cost(aten.linear.default, (meta(B, M, K), meta(N, K)), {}, meta(B, M, N))
    assert cost is not None and cost.mnk == (B * M, N, K)


AGREE: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    (name, fn, inputs)
    for name, fn, inputs, _ in FORWARD
    if name in {"mm", "addmm", "bmm", "baddbmm", "conv1d", "conv2d_padded", "conv2d_strided_dilated", "conv3d"}
]


@pytest.mark.parametrize(("name", "fn", "inputs"), AGREE, ids=[r[0] for r in AGREE])
def test_agrees_with_flop_counter_where_that_is_right(name: str, fn: Any, inputs: Any, trace: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        fn(*inputs)
    assert counter.get_total_flops() > 0
    assert trace(fn, *inputs).flops == counter.get_total_flops()


# --- recurrent layers ---------------------------------------------------------------------------------------------

T, W, H = 4, 6, 10  # steps, input and hidden width; batch B


def test_lstm_op() -> None:
    """aten::lstm: per row, gates 4H from W and from H; 22 pointwise per unit (5 library calls)."""
    params = [
        meta(4 * H, W),
        meta(4 * H, H),
        meta(4 * H),
        meta(4 * H),
        meta(4 * H, H),
        meta(4 * H, H),
        meta(4 * H),
        meta(4 * H),
    ]
    args = (meta(T, B, W), [meta(2, B, H), meta(2, B, H)], params, True, 2, 0.0, True, False, False)
    cost = op_cost(aten.lstm.input, args, {}, (meta(T, B, H), meta(2, B, H), meta(2, B, H)))
    layer1 = 2 * T * B * 4 * H * (W + H)
    layer2 = 2 * T * B * 4 * H * (H + H)
    assert cost is not None and cost.flops == layer1 + layer2 + 2 * (T * B * H) * 22
    assert cost.transcendental == 2 * (T * B * H) * 5
    assert cost.mnk == (B, 4 * H, H)


def test_gru_op_bidirectional() -> None:
    """Two directions: twice gates 3H from W and H, 16 pointwise per unit."""
    params = [meta(3 * H, W), meta(3 * H, H)] * 2
    args = (meta(T, B, W), meta(2, B, H), params, False, 1, 0.0, False, True, False)
    cost = op_cost(aten.gru.input, args, {}, (meta(T, B, 2 * H), meta(2, B, H)))
    assert cost is not None and cost.flops == 2 * (2 * T * B * 3 * H * (W + H) + T * B * H * 16)


def test_traced_lstm_matches_its_op(trace: Any) -> None:
    """What make_fx makes of nn.LSTM (cells or a oneDNN layer) contains the same products."""
    lstm = torch.nn.LSTM(W, H)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        names = [n for n, _ in lstm.named_parameters()]
        out: torch.Tensor = torch.func.functional_call(lstm, dict(zip(names, weights, strict=True)), (x,))[0]
        return out

    traced = trace(run, rand(T, B, W), *[p.detach() for p in lstm.parameters()])
    assert not traced.unknown
    products = 2 * T * B * 4 * H * (W + H)
    cells = T * B * H * 22
    assert products + cells <= traced.flops <= products + cells + 8 * T * B * H  # biases written as adds at most


def test_gru_cell(trace: Any) -> None:
    w_ih, w_hh, b = rand(3 * H, W), rand(3 * H, H), rand(3 * H)
    cost = op_cost(aten.gru_cell.default, (meta(B, W), meta(B, H), w_ih, w_hh, b, b), {}, meta(B, H))
    assert cost is not None and cost.flops == 2 * B * 3 * H * (W + H) + 16 * B * H
    fused = op_cost(
        aten._thnn_fused_gru_cell.default,
        (meta(B, 3 * H), meta(B, 3 * H), meta(B, H), b, b),
        {},
        (meta(B, H), meta(B, 5 * H)),
    )
    assert fused is not None and fused.flops == (16 + 3 + 3) * B * H  # both biases are added apart


def test_fused_lstm_cell_backward() -> None:
    """tanh(c) 1, output gate 1 + 3, cell gradient 5, three gates 1 + 3 each, forget to the older cell 1: 23."""
    args = (meta(B, H), None, meta(B, H), meta(B, H), meta(B, 4 * H), False)
    cost = op_cost(aten._thnn_fused_lstm_cell_backward_impl.default, args, {}, (meta(B, 4 * H), meta(B, H), None))
    assert cost is not None and cost.flops == 23 * B * H


def test_onednn_lstm_layer_and_backward() -> None:
    weights = [meta(4 * H, W), meta(4 * H, H), meta(4 * H), meta(4 * H)]
    args: tuple[Any, ...] = (
        meta(T, B, W),
        *weights,
        meta(1, B, H),
        meta(1, B, H),
        False,
        [],
        2,
        H,
        1,
        True,
        False,
        False,
        True,
    )
    cost = op_cost(aten.mkldnn_rnn_layer.default, args, {}, (meta(T, B, H), meta(1, B, H), meta(1, B, H), meta(1)))
    products = 2 * T * B * 4 * H * (W + H)
    assert cost is not None and cost.flops == products + 22 * T * B * H
    outs = [meta(T, B, H), meta(1, B, H), meta(1, B, H)]
    args = (
        meta(T, B, W),
        *weights,
        meta(1, B, H),
        meta(1, B, H),
        *outs,
        *outs,
        False,
        2,
        H,
        1,
        True,
        True,
        False,
        [],
        False,
        meta(1),
    )
    cost = op_cost(aten.mkldnn_rnn_layer_backward.default, args, {}, tuple(outs))
    assert cost is not None and cost.flops == 2 * products + 23 * T * B * H


def test_cudnn_rnn_with_projection() -> None:
    """proj_size P: hidden-to-hidden takes P, and each step projects H to P."""
    p = 3
    weights = [meta(4 * H, W), meta(4 * H, p), meta(4 * H), meta(4 * H), meta(p, H)]
    args: tuple[Any, ...] = (
        meta(T, B, W),
        weights,
        5,
        None,
        meta(1, B, p),
        meta(1, B, H),
        2,
        H,
        p,
        1,
        False,
        0.0,
        True,
        False,
        [],
        None,
    )
    cost = op_cost(aten._cudnn_rnn.default, args, {}, (meta(T, B, p),))
    assert cost is not None
    assert cost.flops == 2 * T * B * (4 * H * (W + p) + p * H) + 22 * T * B * H
