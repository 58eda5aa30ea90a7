"""FLOPs and bytes of plain models against figures derived by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto as T

F32 = 4


def test_mlp(analyse: Any, node: Any) -> None:
    """Gemm, Relu, Gemm: 2 M N K each, biases in the epilogue, Relu 1 per element."""
    m, k, h, n = 8, 32, 64, 10
    found = analyse(
        [
            node("Gemm", "x w1 b1", "h", name="/fc1/Gemm", transB=1),
            node("Relu", "h", "r", name="/act/Relu"),
            node("Gemm", "r w2 b2", "y", name="/fc2/Gemm"),
        ],
        {"x": [m, k]},
        {"w1": [h, k], "b1": [h], "w2": [h, n], "b2": [n]},
    )
    assert [o.cost.flops for o in found.program.ops] == [2 * m * h * k, m * h, 2 * m * n * h]
    first = found.program.ops[0]
    assert (first.reads, first.writes) == (F32 * (m * k + h * k + h), F32 * m * h)
    assert first.cost.mnk == (m, h, k)
    assert [o.module for o in found.program.ops] == ["fc1", "act", "fc2"]
    assert found.facts.parameters == h * k + h + h * n + n
    assert found.facts.parameter_bytes == F32 * found.facts.parameters
    assert found.facts.outputs == (f"y: float32[{m}, {n}]",)
    assert found.notes == "" and not found.program.unknown
    assert found.program.working_set == F32 * (m * k + found.facts.parameters)


def test_linear_as_matmul_and_add(analyse: Any, node: Any) -> None:
    """A bias of weights is the product's epilogue; a second addition is not."""
    nodes = [node("MatMul", "x w", "a"), node("Add", "b a", "c"), node("Add", "c x2", "y")]
    found = analyse(nodes, {"x": [2, 8, 16], "x2": [2, 8, 32]}, {"w": [16, 32], "b": [32]})
    product, bias, residual = found.program.ops
    assert product.cost.flops == 2 * 2 * 8 * 16 * 32
    assert product.reads == F32 * (2 * 8 * 16 + 16 * 32 + 32)
    assert (bias.cost.flops, bias.reads, bias.writes, bias.group) == (0, 0, 0, None)
    assert residual.cost.flops == 2 * 8 * 32
    assert [g.kind for g in found.program.groups] == ["matmul", "pointwise"]


def test_product_used_twice_keeps_its_addition(analyse: Any, node: Any) -> None:
    nodes = [node("MatMul", "x w", "a"), node("Add", "a b", "c"), node("Mul", "a c", "y")]
    found = analyse(nodes, {"x": [8, 16]}, {"w": [16, 32], "b": [32]})
    assert found.flops("Add") == 8 * 32


def test_conv_net(analyse: Any, node: Any) -> None:
    n, c, s, o = 2, 3, 16, 8
    found = analyse(
        [
            node("Conv", "x w b", "a", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            node("BatchNormalization", "a g t m v", "bn"),
            node("Relu", "bn", "r"),
            node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
            node("Conv", "p dw", "d", group=o, kernel_shape=[3, 3]),
            node("ConvTranspose", "d tw", "t2", strides=[2, 2]),
            node("GlobalAveragePool", "t2", "q"),
            node("Flatten", "q", "y"),
        ],
        {"x": [n, c, s, s]},
        {"w": [o, c, 3, 3], "b": [o], "g": [o], "t": [o], "m": [o], "v": [o], "dw": [o, 1, 3, 3], "tw": [o, 4, 2, 2]},
    )
    full = n * o * s * s
    flops = [op.cost.flops for op in found.program.ops]
    assert flops == [
        2 * full * c * 9,
        4 * full + 2 * o,
        full,
        full // 4 * 4,
        2 * n * o * 6 * 6 * 9,
        2 * (n * o * 6 * 6) * 4 * 4,
        n * 4 * 12 * 12 + n * 4,
        0,
    ]
    assert found.facts.outputs == (f"y: float32[{n}, 4]",)
    # Normalisation and activation are one kernel: the convolution's result in, one tensor out.
    fused = next(g for g in found.program.groups if len(g.ops) > 1)
    assert {found.program.ops[i].target for i in fused.ops} >= {"onnx.BatchNormalization", "onnx.Relu"}


def _hand_attention(node: Any, scale: str = "s") -> list[Any]:
    return [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "qk"),
        node("Div", f"qk {scale}", "sc"),
        node("Add", "sc mask", "ms"),
        node("Softmax", "ms", "p", axis=-1),
        node("MatMul", "p v", "y"),
    ]


def test_attention_by_hand(analyse: Any, node: Any) -> None:
    """Products 2 b h s s d each; scale and mask 1, softmax 5 per score; scores are read and written once."""
    b, h, s, d = 2, 4, 32, 16
    shape = [b, h, s, d]
    found = analyse(
        _hand_attention(node), {"q": shape, "k": shape, "v": shape, "mask": [1, 1, s, s]}, consts={"s": np.float32(4)}
    )
    scores = b * h * s * s
    assert found.flops() == 2 * (2 * scores * d) + 2 * scores + 5 * scores
    softmax = next(g for g in found.program.groups if len(g.ops) == 3)
    assert [found.program.ops[i].target for i in softmax.ops] == ["onnx.Div", "onnx.Add", "onnx.Softmax"]
    assert (softmax.reads, softmax.writes) == (F32 * (scores + s * s), F32 * scores)
    assert softmax.inner == s
    assert len(found.program.groups) == 3
    alone = found.op("Softmax")
    assert (alone.reads, alone.writes) == (F32 * scores, F32 * scores)


def test_norms(analyse: Any, node: Any) -> None:
    """Layer norm 8n + 4r with weight and bias, group norm the same over its groups, RMS 4n + 3r."""
    n, c, s = 2, 8, 6
    found = analyse(
        [
            node("LayerNormalization", "x g b", "l", axis=-1),
            node("RMSNormalization", "l g", "r", axis=-1),
            node("GroupNormalization", "r gc bc", "q", num_groups=4),
            node("InstanceNormalization", "q gc bc", "i"),
            node("LpNormalization", "i", "y", axis=1, p=2),
        ],
        {"x": [n, c, s]},
        {"g": [s], "b": [s], "gc": [c], "bc": [c]},
        opset=23,
    )
    e = n * c * s
    flops = [o.cost.flops for o in found.program.ops]
    assert flops == [8 * e + 4 * n * c, 4 * e + 3 * n * c, 8 * e + 4 * n * 4, 8 * e + 4 * n * c, 3 * e + n * s]


def test_softmax_before_opset_13_flattens(analyse: Any, node: Any) -> None:
    found = analyse([node("LogSoftmax", "x", "y", axis=1)], {"x": [2, 3, 4]}, opset=11)
    assert found.op("LogSoftmax").cost.flops == 5 * 24 + 2  # two rows of 12
    modern = analyse([node("LogSoftmax", "x", "y", axis=1)], {"x": [2, 3, 4]}, opset=13)
    assert modern.op("LogSoftmax").cost.flops == 5 * 24 + 8  # eight rows of 3


def test_lstm(analyse: Any, node: Any) -> None:
    """Products 2 rows (4H I + 4H H) per direction, 22 per unit; peepholes 3 multiply-adds more."""
    t, b, i, h, d = 5, 2, 3, 4, 2
    weights = {"w": [d, 4 * h, i], "r": [d, 4 * h, h], "b": [d, 8 * h], "p": [d, 3 * h]}
    plain = analyse([node("LSTM", "x w r b", "y", hidden_size=h, direction="bidirectional")], {"x": [t, b, i]}, weights)
    products = 2 * t * b * d * (4 * h * i + 4 * h * h)
    assert plain.flops() == products + 22 * t * b * d * h
    node_with = node("LSTM", "x w r b - - - p", "y", hidden_size=h, direction="bidirectional")
    assert analyse([node_with], {"x": [t, b, i]}, weights).flops() == products + (22 + 6) * t * b * d * h
    op = plain.op("LSTM")
    read = t * b * i + d * 4 * h * (i + h) + d * 8 * h
    assert (op.reads, op.writes) == (F32 * read, F32 * t * d * b * h)


def test_quantised(analyse: Any, node: Any) -> None:
    """Integer products count as floating ones; quantise 4, dequantise 2 per element; int4 takes half a byte."""
    m, k, n = 8, 32, 16
    found = analyse(
        [node("QLinearMatMul", "a as az b bs bz ys yz", "y")],
        {"a": ([m, k], T.UINT8)},
        {"b": ([k, n], T.INT8)},
        consts={
            "as": np.float32(0.1), "az": np.uint8(3), "bs": np.float32(0.2), "bz": np.int8(0), "ys": np.float32(0.3),
            "yz": np.uint8(1),
        },
    )  # fmt: skip
    op = found.op("QLinearMatMul")
    assert op.cost.flops == 2 * m * n * k
    assert (op.reads, op.writes, op.dtype) == (m * k + k * n, m * n, "uint8")

    qdq = analyse(
        [
            node("DequantizeLinear", "w ws", "wf", axis=0, block_size=16),
            node("QuantizeLinear", "x xs xz", "xq"),
            node("DequantizeLinear", "xq xs xz", "xf"),
            node("MatMul", "xf wf", "y"),
        ],
        {"x": [m, k]},
        {"w": ([k, n], T.INT4), "ws": [k // 16, n]},
        consts={"xs": np.float32(0.1), "xz": np.int8(0)},
    )
    assert [o.cost.flops for o in qdq.program.ops] == [2 * k * n, 4 * m * k, 2 * m * k, 2 * m * n * k]
    assert qdq.program.ops[0].reads == k * n // 2 + F32 * (k // 16) * n
    assert qdq.facts.parameter_bytes == k * n // 2 + F32 * (k // 16) * n


def test_dtype_replaces_floating_types(analyse: Any, node: Any) -> None:
    args: tuple[Any, ...] = ([node("MatMul", "x w", "y")], {"x": [8, 16]}, {"w": [16, 32]})
    full, half = analyse(*args), analyse(*args, dtype=torch.bfloat16)
    assert half.op("MatMul").reads * 2 == full.op("MatMul").reads
    assert half.op("MatMul").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("op", "attrs", "flops"),
    [
        ("Gelu", {}, 5),
        ("Gelu", {"approximate": "tanh"}, 9),
        ("Sigmoid", {}, 4),
        ("Softsign", {}, 3),
        ("HardSwish", {}, 4),
        ("Elu", {}, 6),
        ("Shrink", {"bias": 0.5}, 6),
        ("Swish", {"alpha": 1.0}, 4),
        ("Swish", {"alpha": 1.5}, 6),
        ("Identity", {}, 0),
        ("Cast", {"to": T.FLOAT16}, 0),
    ],
)
def test_pointwise(analyse: Any, node: Any, op: str, attrs: dict[str, Any], flops: int) -> None:
    found = analyse([node(op, "x", "y", **attrs)], {"x": [3, 5]}, opset=24)
    assert found.op(op).cost.flops == flops * 15


def test_views_and_copies(analyse: Any, node: Any) -> None:
    """A reshape across a transpose copies; slices, splits and expansions are views and move nothing."""
    found = analyse(
        [
            node("Transpose", "x", "t", perm=[1, 0]),
            node("Reshape", "t shape", "r"),
            node("Slice", "r start end", "s"),
            node("Split", "s", "a b", axis=0, num_outputs=2),
            node("Expand", "a big", "e"),
            node("Mul", "e b", "y"),
        ],
        {"x": [4, 6]},
        consts={"shape": np.array([24]), "start": np.array([4]), "end": np.array([24]), "big": np.array([3, 10])},
    )
    moved = {o.target.removeprefix("onnx."): (o.reads, o.writes) for o in found.program.ops}
    assert moved["Transpose"] == moved["Slice"] == moved["Split"] == moved["Expand"] == (0, 0)
    assert moved["Reshape"] == (24 * F32, 24 * F32)
    assert moved["Mul"] == (10 * F32 + 10 * F32, 30 * F32)  # what an expanded operand stores, not what it shows


def test_gather_reads_what_it_takes(analyse: Any, node: Any) -> None:
    found = analyse([node("Gather", "table ids", "y")], {"ids": ([2, 8], T.INT64)}, {"table": [50000, 64]})
    op = found.op("Gather")
    assert (op.cost.flops, op.reads, op.writes) == (0, F32 * 16 * 64 + 8 * 16, F32 * 16 * 64)


def test_einsum_and_fft(analyse: Any, node: Any) -> None:
    found = analyse([node("Einsum", "a b", "y", equation="bij,bjk->bik")], {"a": [2, 3, 4], "b": [2, 4, 5]})
    assert found.op("Einsum").cost.flops == 2 * 2 * 3 * 4 * 5
    real = analyse([node("DFT", "x - ax", "y", onesided=1)], {"x": [2, 16, 1]}, consts={"ax": np.int64(1)}, opset=20)
    assert real.op("DFT").cost.flops == 2.5 * 2 * 16 * 4
    assert real.facts.outputs == ("y: float32[2, 9, 2]",)
