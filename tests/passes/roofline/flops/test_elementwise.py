"""Conformance of everything that is no product: pointwise, reductions, norms, losses, indexing, pooling, FFT, sort, and
their backwards, against hand-derived counts. n, r, ... are spelled out in every row.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import rand

from optpass.passes.roofline.flops import op_cost

aten, prims = torch.ops.aten, torch.ops.prims
R, C = 6, 16
n = R * C
X, Y = rand(R, C) + 0.1, rand(R, C) + 0.1
IMG = rand(2, 4, 6, 8)
p = 2 * 4 * 6 * 8  # elements of IMG
IDX = torch.randint(0, R, (5,))
Z = torch.complex(X, Y)

Row = tuple[str, Callable[..., Any], tuple[Any, ...], float]

FORWARD: list[Row] = [
    # pointwise: flops per output element
    ("add", torch.add, (X, Y), n),
    ("add_alpha", lambda a, b: torch.add(a, b, alpha=2.0), (X, Y), 2 * n),  # multiply, add
    ("mul_broadcast", torch.mul, (X, rand(C)), n),
    ("div_floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), (X, Y), 2 * n),
    ("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (X, Y, Y), 3 * n),
    ("lerp", lambda a, b: torch.lerp(a, b, 0.3), (X, Y), 3 * n),  # a + w (b - a)
    ("pow2", lambda a: a**2, (X,), n),  # one multiplication
    ("pow3", lambda a: a**3, (X,), 2 * n),
    ("relu", torch.relu, (X,), n),
    ("where", torch.where, (X > 0.5, X, Y), n),
    ("sigmoid", torch.sigmoid, (X,), 4 * n),  # negate, exp, add, divide
    ("silu", F.silu, (X,), 4 * n),  # x / (1 + exp(-x))
    ("gelu", F.gelu, (X,), 5 * n),  # 0.5 x (1 + erf(x c))
    ("gelu_tanh", lambda a: F.gelu(a, approximate="tanh"), (X,), 9 * n),
    ("softplus", F.softplus, (X,), 6 * n),
    ("glu", F.glu, (X,), 5 * n // 2),  # half the outputs: sigmoid 4, multiply
    ("complex_mul", torch.mul, (Z, Z), 6 * n),  # 4 products, 2 sums
    ("complex_add", torch.add, (Z, Z), 2 * n),
    ("cast", lambda a: a.to(torch.float64), (X,), 0),
    ("fill", torch.zeros_like, (X,), 0),
    ("cat", lambda a, b: torch.cat([a, b]), (X, Y), 0),
    ("views", lambda a: a.view(C, R).t().unsqueeze(0).expand(3, R, C), (X,), 0),
    # reductions: n inputs, R outputs
    ("sum", lambda a: a.sum(1), (X,), n),
    ("mean", lambda a: a.mean(1), (X,), n + R),
    ("amax", lambda a: a.amax(1), (X,), n),
    ("argmax", lambda a: a.argmax(1), (X,), n),
    ("max_dim", lambda a: a.max(1).values, (X,), n),
    ("prod", lambda a: a.prod(1), (X,), n),
    ("all", lambda a: (a > 0).all(), (X,), n + n),  # compare, and
    ("var", lambda a: a.var(1), (X,), 4 * n + 2 * R),  # mean n + R; subtract, square, sum 3n; divide R
    ("std", lambda a: a.std(1), (X,), 4 * n + 3 * R),
    ("norm2", lambda a: torch.linalg.vector_norm(a, 2, 1), (X,), 2 * n + R),  # square, sum; root
    ("norm1", lambda a: torch.linalg.vector_norm(a, 1, 1), (X,), 2 * n),
    ("norm3", lambda a: torch.linalg.vector_norm(a, 3, 1), (X,), 3 * n + R),  # abs, pow, sum; pow
    ("logsumexp", lambda a: torch.logsumexp(a, 1), (X,), 4 * n + 2 * R),
    ("cumsum", lambda a: a.cumsum(1), (X,), n),
    ("logcumsumexp", lambda a: a.logcumsumexp(1), (X,), 7 * n),
    ("softmax", lambda a: F.softmax(a, 1), (X,), 5 * n),  # max, subtract, exp, sum, divide
    ("log_softmax", lambda a: F.log_softmax(a, 1), (X,), 5 * n + R),  # and a log per row
    # norms: n elements in R rows: 6n + 4R, weight n, bias n
    ("layer_norm", lambda a, w, b: F.layer_norm(a, (C,), w, b), (X, rand(C), rand(C)), 8 * n + 4 * R),
    ("layer_norm_plain", lambda a: F.layer_norm(a, (C,)), (X,), 6 * n + 4 * R),
    # square n; mean n + R; eps, rsqrt 2R; scale n; weight n
    ("rms_norm", lambda a, w: F.rms_norm(a, (C,), w), (X, rand(C)), 4 * n + 3 * R),
    # 2 images of 2 groups: 4 rows
    ("group_norm", lambda a, w, b: F.group_norm(a, 2, w, b), (IMG, rand(4), rand(4)), 8 * p + 4 * 4),
    # 4 channels; running statistics 7 each
    (
        "batch_norm_train",
        lambda a, m, v, w, b: F.batch_norm(a, m, v, w, b, True),
        (IMG, rand(4), rand(4), rand(4), rand(4)),
        8 * p + 4 * 4 + 7 * 4,
    ),
    # rsqrt(var + eps) 2 per channel; subtract, scale, weight, bias
    (
        "batch_norm_eval",
        lambda a, m, v, w, b: F.batch_norm(a, m, v, w, b, False),
        (IMG, rand(4), rand(4), rand(4), rand(4)),
        4 * p + 2 * 4,
    ),
    # losses: mean adds n + 1
    ("mse_loss", F.mse_loss, (X, Y), 2 * n + n + 1),
    ("smooth_l1", F.smooth_l1_loss, (X, Y), 8 * n + n + 1),
    ("bce", F.binary_cross_entropy, (X / 2, Y / 2), 9 * n + n + 1),  # 2 logs, 2 max, 2 products, 3 differences
    # log_softmax 5n + R; negate R, sum R, divide 1
    ("cross_entropy", F.cross_entropy, (X, torch.randint(0, C, (R,))), (5 * n + R) + (R + R + 1)),
    # indexing
    ("embedding", F.embedding, (IDX, rand(R, C)), 0),
    ("index_select", lambda a, i: a.index_select(0, i), (X, IDX), 0),
    ("gather", lambda a, i: a.gather(1, i), (X, torch.zeros(R, 3, dtype=torch.long)), 0),
    ("scatter", lambda a, i, s: a.scatter(1, i, s), (X, torch.zeros(R, 3, dtype=torch.long), rand(R, 3)), 0),
    (
        "scatter_add",
        lambda a, i, s: a.scatter_add(1, i, s),
        (X, torch.zeros(R, 3, dtype=torch.long), rand(R, 3)),
        R * 3,
    ),
    (
        "scatter_mean",
        lambda a, i, s: a.scatter_reduce(1, i, s, "mean"),
        (X, torch.zeros(R, 3, dtype=torch.long), rand(R, 3)),
        2 * R * 3 + n,
    ),
    ("index_add", lambda a, i, s: a.index_add(0, i, s), (X, IDX, rand(5, C)), 5 * C),
    ("index_put_accumulate", lambda a, i, s: a.index_put((i,), s, accumulate=True), (X, IDX, rand(C)), 5 * C),
    (
        "embedding_bag_mean",
        lambda i, w, o: F.embedding_bag(i, w, o),
        (torch.randint(0, R, (10,)), rand(R, C), torch.tensor([0, 4])),
        10 * C + 2 * C,
    ),
    # pooling: 2 x 4 planes of 3 x 4 outputs
    ("avg_pool2d", lambda a: F.avg_pool2d(a, 2), (IMG,), (2 * 4 * 3 * 4) * (4 + 1)),
    ("max_pool2d", lambda a: F.max_pool2d(a, 2), (IMG,), (2 * 4 * 3 * 4) * 4),
    # 8 wide into 3: windows [0,3) [2,6) [5,8): 3 + 4 + 3; 6 high into 2: 3 + 3
    (
        "adaptive_avg_pool2d",
        lambda a: F.adaptive_avg_pool2d(a, (2, 3)),
        (IMG,),
        (2 * 4) * (3 + 3) * (3 + 4 + 3) + 2 * 4 * 6,
    ),
    (
        "bilinear",
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"),
        (IMG,),
        9 * 4 * p,
    ),  # 3 interpolations of 3
    ("nearest", lambda a: F.interpolate(a, scale_factor=2), (IMG,), 0),
    # transforms: 5 N log2 N complex, half for real
    ("fft", torch.fft.fft, (torch.complex(rand(3, 16), rand(3, 16)),), 3 * 5 * 16 * log2(16)),
    ("rfft", torch.fft.rfft, (rand(3, 16),), 3 * 2.5 * 16 * log2(16)),
    ("irfft", torch.fft.irfft, (torch.fft.rfft(rand(3, 16)),), 3 * 2.5 * 16 * log2(16)),
    ("fft2", torch.fft.fft2, (torch.complex(rand(3, 4, 8), rand(3, 4, 8)),), 3 * 5 * 32 * log2(32)),
    ("sort", lambda a: a.sort(1).values, (X,), R * C * log2(C)),
    ("topk", lambda a: a.topk(3, 1).values, (X,), R * C * log2(C)),
    ("searchsorted", torch.searchsorted, (torch.sort(rand(16)).values, X), n * log2(16)),
    ("cdist", torch.cdist, (rand(5, C), rand(7, C)), 5 * 7 * (3 * C + 1)),  # subtract, square, add; root
    # factorisations
    ("cholesky", torch.linalg.cholesky, (torch.eye(12),), 12**3 / 3),
    (
        "qr_reduced",
        lambda a: torch.linalg.qr(a),
        (rand(12, 6),),
        (2 * 12 * 36 - 2 * 6**3 / 3) + (4 * 12 * 36 - 2 * 18 * 36 + 4 * 6**3 / 3),
    ),
    ("lu", lambda a: torch.linalg.lu_factor(a), (rand(12, 12),), 2 * 12**3 / 3),
    ("svd_values", lambda a: aten._linalg_svd(a, False, False)[1], (rand(12, 6),), 2 * 12 * 36 + 2 * 6**3),
    ("eigh", torch.linalg.eigh, (torch.eye(6),), 9 * 6**3),
    ("triangular", lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), (torch.eye(6), rand(6, 5)), 36 * 5),
    # random numbers
    ("bernoulli", torch.bernoulli, (X / 2,), 2 * n),  # draw, compare
    ("dropout", lambda a: aten.native_dropout(a, 0.1, True)[0], (X,), 4 * n),
    ("dropout_eval", lambda a: aten.native_dropout(a, 0.1, False)[0], (X,), 0),
    ("randn_like", torch.randn_like, (X,), 7 * n),
]

BACKWARD: list[Row] = [
    ("relu", torch.relu, (X,), n + 2 * n),  # max; compare, select
    ("mul", torch.mul, (X, Y), n + 2 * n),
    ("sigmoid", torch.sigmoid, (X,), 4 * n + 3 * n),  # g y (1 - y)
    ("tanh", torch.tanh, (X,), n + 3 * n),  # g (1 - y y)
    ("silu", F.silu, (X,), 4 * n + 9 * n),  # sigmoid 4; g s (1 + x (1 - s)) 5
    ("gelu", F.gelu, (X,), 5 * n + 11 * n),  # cdf 4, pdf 4, g (cdf + x pdf) 3
    ("gelu_tanh", lambda a: F.gelu(a, approximate="tanh"), (X,), 9 * n + 18 * n),
    ("add_broadcast", torch.add, (X, rand(C)), n + n),  # the row's gradient sums n
    ("sum", lambda a: a.sum(1), (X,), n + 0),  # backward expands
    ("mean", lambda a: a.mean(1), (X,), n + R + n),  # backward divides the expanded gradient
    ("softmax", lambda a: F.softmax(a, 1), (X,), 5 * n + 4 * n),
    ("log_softmax", lambda a: F.log_softmax(a, 1), (X,), 5 * n + R + 4 * n),
    # x_hat 2n; input 7n + 2R, weight product n; weight 2n; bias n
    (
        "layer_norm",
        lambda a, w, b: F.layer_norm(a, (C,), w, b),
        (X, rand(C), rand(C)),
        (8 * n + 4 * R) + (2 * n + 8 * n + 2 * R + 2 * n + n),
    ),
    (
        "group_norm",
        lambda a, w, b: F.group_norm(a, 2, w, b),
        (IMG, rand(4), rand(4)),
        (8 * p + 4 * 4) + (2 * p + 8 * p + 2 * 4 + 2 * p + p),
    ),
    (
        "batch_norm",
        lambda a, w, b: F.batch_norm(a, None, None, w, b, True),
        (IMG, rand(4), rand(4)),
        (8 * p + 4 * 4) + (2 * p + 8 * p + 2 * 4 + 2 * p + p),
    ),
    ("mse_loss", F.mse_loss, (X, Y), (3 * n + 1) + 2 * 3 * n),  # 2/n (x - y) g, for either side
    # scatter one negated gradient per row, divide once; softmax backward 4n
    ("cross_entropy", F.cross_entropy, (X, torch.randint(0, C, (R,))), (5 * n + R) + (2 * R + 1) + (R + 1) + 4 * n),
    ("embedding", F.embedding, (IDX, rand(R, C)), 0 + 5 * C),  # one add per gradient element
    ("index_select", lambda a, i: a.index_select(0, i), (X, IDX), 0 + 5 * C),
    ("gather", lambda a, i: a.gather(1, i), (X, torch.zeros(R, 3, dtype=torch.long)), 0 + R * 3),
    ("index", lambda a, i: a[i], (X, IDX), 0 + 5 * C),
    ("avg_pool2d", lambda a: F.avg_pool2d(a, 2), (IMG,), (2 * 4 * 12) * 5 + (2 * 4 * 12) * 5),
    ("max_pool2d", lambda a: F.max_pool2d(a, 2), (IMG,), (2 * 4 * 12) * 4 + 2 * 4 * 12),
    ("bilinear", lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), (IMG,), 9 * 4 * p + 8 * 4 * p),
    ("nearest", lambda a: F.interpolate(a, scale_factor=2), (IMG,), 0 + 4 * p),
    ("cumsum", lambda a: a.cumsum(1), (X,), n + n),  # reversed: flips are copies
    ("sort", lambda a: a.sort(1).values, (X,), n * log2(C) + 0),  # a scatter to distinct places adds nothing
    ("scatter_add", lambda a, s: a.scatter_add(1, torch.zeros(R, 3, dtype=torch.long), s), (X, rand(R, 3)), R * 3 + 0),
    # draw, compare, divide the mask by 1 - p, multiply; the backward multiplies by that mask
    ("dropout_composite", lambda a: F.dropout(a, 0.5), (X,), 4 * n + n),
    ("native_dropout", lambda a: torch.native_dropout(a, 0.5, True)[0], (X,), 4 * n + 2 * n),
]


def _ids(rows: list[Row]) -> list[str]:
    return [row[0] for row in rows]


@pytest.mark.parametrize(("name", "fn", "inputs", "expected"), FORWARD, ids=_ids(FORWARD))
def test_forward(name: str, fn: Any, inputs: Any, expected: float, trace: Any) -> None:
    traced = trace(fn, *inputs)
    assert not traced.unknown
    assert traced.flops == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "fn", "inputs", "expected"), BACKWARD, ids=_ids(BACKWARD))
def test_backward(name: str, fn: Any, inputs: Any, expected: float, trace_backward: Any) -> None:
    traced = trace_backward(fn, *inputs)
    assert not traced.unknown
    assert traced.flops == pytest.approx(expected, rel=1e-12)


def meta(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="meta")


DIRECT: list[tuple[str, Any, tuple[Any, ...], Any, float]] = [
    ("rms_norm", aten._fused_rms_norm, (meta(R, C), [C], meta(C), 1e-6), (meta(R, C), meta(R, 1)), 4 * n + 3 * R),
    # x_hat n; g = dy w n; g x_hat, sum 2n; mean R; x_hat c, subtract, times rstd 3n; weight 2n
    (
        "rms_norm_backward",
        aten._fused_rms_norm_backward,
        (meta(R, C), meta(R, C), [C], meta(R, 1), meta(C), [True, True]),
        (meta(R, C), meta(C)),
        n + 6 * n + R + 2 * n,
    ),
    # only the bias gradient is wanted: a sum
    (
        "layer_norm_backward_bias",
        aten.native_layer_norm_backward,
        (meta(R, C), meta(R, C), [C], meta(R, 1), meta(R, 1), meta(C), meta(C), [False, False, True]),
        (None, None, meta(C)),
        n,
    ),
    # statistics are constants: invstd 2 per channel, weight times it 1, times grad p
    (
        "batch_norm_backward_eval",
        aten.native_batch_norm_backward,
        (IMG, IMG, meta(4), meta(4), meta(4), None, None, False, 1e-5, [True, False, False]),
        (IMG, None, None),
        p + 3 * 4,
    ),
    # 2 frames of labels 2 and 1 in 5 frames: 13 per cell of T x (2S + 1)
    (
        "ctc",
        aten._ctc_loss,
        (meta(5, 2, 7), meta(2, 2), [5, 4], [2, 1]),
        (meta(2), meta(2, 5, 5)),
        13 * (5 * 5 + 4 * 3),
    ),
    (
        "embedding_bag_backward_sum",
        aten._embedding_bag_dense_backward,
        (meta(2, C), meta(10), meta(10), meta(2), meta(2), R, False, 0, None),
        meta(R, C),
        10 * C,
    ),
    # per point: unnormalise 8, floor 2, fractions 4, weights 4; per channel 4 products, 3 sums
    ("grid_sampler", aten.grid_sampler_2d, (IMG, meta(2, 5, 5, 2), 0, 0, False), meta(2, 4, 5, 5), 50 * (18 + 7 * 4)),
    ("c2c_two_dims", aten._fft_c2c, (Z.expand(3, R, C), [1, 2], 0, True), Z.expand(3, R, C), 3 * 5 * n * log2(n)),
    ("quantize", torch.ops.aten.quantize_per_channel, (X, meta(R), meta(R), 0, torch.qint8), X, 4 * n),
    ("fake_quantize", aten.fake_quantize_per_tensor_affine, (X, 0.1, 0, 0, 255), X, 6 * n),
    ("prims_var", prims.var, (X, [1], 1.0), meta(R), 4 * n + 2 * R),
    ("prims_cast", prims.convert_element_type, (X, torch.bfloat16), X, 0),
    ("prims_iota", prims.iota, (R,), meta(R), 2 * R),
    ("all_pairs", aten._pdist_forward, (X, 2.0), meta(R * (R - 1) // 2), R * (R - 1) // 2 * (3 * C + 1)),
    ("inverse", aten.linalg_inv_ex, (meta(3, 6, 6),), (meta(3, 6, 6), meta(3)), 3 * 2 * 6**3),
    ("solve", aten._linalg_solve_ex, (meta(6, 6), meta(6, 2)), (meta(6, 2),), 2 * 6**3 / 3 + 2 * 36 * 2),
    ("unscale", aten._amp_foreach_non_finite_check_and_unscale_, ([X, Y], meta(1), meta(1)), None, 2 * 2 * n),
]


@pytest.mark.parametrize(("name", "target", "args", "out", "expected"), DIRECT, ids=[r[0] for r in DIRECT])
def test_ops_called_directly(name: str, target: Any, args: Any, out: Any, expected: float) -> None:
    cost = op_cost(target, args, {}, out)
    assert cost is not None
    assert cost.flops == pytest.approx(expected, rel=1e-12)


def test_chunked_linear_cross_entropy() -> None:
    """Logits, input and weight gradients are three products; the loss beside them costs the rest."""
    pytest.importorskip("torch.nn.modules.linear_cross_entropy", reason="new in torch 2.13; registers the op")
    op = torch.ops.torch_nn._linear_cross_entropy_batch_chunked
    rows, width, classes = 12, 5, 9
    inputs = (meta(rows, width), meta(classes, width), meta(rows), None, None, "mean", -100, 0.0, 4, "x", None, False)
    out = (meta(), meta(rows, width), meta(classes, width), meta(0))
    cost = op_cost(op, (*inputs, False, False, False), {}, out)
    product, s = 2 * rows * classes * width, rows * classes
    assert cost is not None and cost.flops == product + 4 * s + 5 * rows
    assert (cost.mnk, cost.batch) == ((4, classes, width), 3)
    cost = op_cost(op, (*inputs, True, True, False), {}, out)
    assert cost is not None
    assert cost.flops == 3 * product + (4 * s + 5 * rows) + (s + rows) + 3 * rows * width


def test_transcendental_counts() -> None:
    """The library calls among the flops, for the CPU's time model."""
    for target, flops, library in (
        (aten.exp.default, 1, 1),
        (aten.tanh.default, 1, 1),
        (aten.sigmoid.default, 4, 1),
        (aten.gelu.default, 5, 1),
        (aten.mul.Tensor, 1, 0),
        (aten.rsqrt.default, 1, 1),
    ):
        cost = op_cost(target, (X, X)[: 2 if target is aten.mul.Tensor else 1], {}, X)
        assert cost is not None and (cost.flops, cost.transcendental) == (flops * n, library * n)
