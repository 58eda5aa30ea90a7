"""com.microsoft ops that onnxruntime's optimiser and quantisers put into models."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto as T

MS = "com.microsoft"
B, S, W = 2, 8, 16
N = B * S * W


def test_skip_norms(analyse: Any, node: Any) -> None:
    inputs = {"x": [B, S, W], "skip": [B, S, W]}
    weights = {"g": [W], "b": [W], "bias": [W]}
    full = analyse([node("SkipLayerNormalization", "x skip g b bias", "y - - sum", domain=MS)], inputs, weights)
    assert full.flops() == 2 * N + 8 * N + 4 * B * S
    op = full.op("SkipLayerNormalization")
    assert (op.reads, op.writes) == (4 * (2 * N + 3 * W), 4 * 2 * N)
    rms = analyse([node("SkipSimplifiedLayerNormalization", "x skip g", "y", domain=MS)], inputs, weights)
    assert rms.flops() == N + 4 * N + 3 * B * S
    # onnxruntime puts this one into ai.onnx, where ONNX itself knows no such op.
    plain = analyse([node("SimplifiedLayerNormalization", "x g", "y", axis=-1)], inputs, weights)
    assert plain.flops() == 4 * N + 3 * B * S
    assert plain.facts.outputs == (f"y: float32[{B}, {S}, {W}]",)


def test_activations(analyse: Any, node: Any) -> None:
    for op, names, per in (("Gelu", "x", 5), ("FastGelu", "x b", 10), ("BiasGelu", "x b", 6), ("QuickGelu", "x", 6)):
        found = analyse([node(op, names, "y", domain=MS)], {"x": [B, S, W]}, {"b": [W]})
        assert found.flops() == per * N, op
        assert found.facts.outputs == (f"y: float32[{B}, {S}, {W}]",)


def test_products(analyse: Any, node: Any) -> None:
    fused = analyse(
        [node("FusedMatMul", "a b", "y", domain=MS, transA=1, transB=1, alpha=0.5)],
        {"a": [B, W, S], "b": [B, 5, W]},
    )
    assert fused.flops() == 2 * B * S * 5 * W
    assert fused.facts.outputs == (f"y: float32[{B}, {S}, 5]",)
    k, n, block = 64, 32, 16
    packed = analyse(
        [node("MatMulNBits", "a q scales", "y", domain=MS, K=k, N=n, bits=4, block_size=block)],
        {"a": ([B, S, k], T.FLOAT16)},
        {"q": ([n, k // block, block // 2], T.UINT8), "scales": ([n * k // block], T.FLOAT16)},
    )
    op = packed.op("MatMulNBits")
    assert op.cost.flops == 2 * B * S * n * k
    assert op.reads == 2 * B * S * k + n * k // 2 + 2 * n * k // block
    assert op.dtype == "float16"


def test_quantised_elementwise(analyse: Any, node: Any) -> None:
    """Dequantise both 4, add 1, quantise 4."""
    scales = {n: np.float32(0.1) for n in ("s1", "s2", "s3")} | {n: np.uint8(1) for n in ("z1", "z2", "z3")}
    found = analyse(
        [node("QLinearAdd", "a s1 z1 b s2 z2 s3 z3", "y", domain=MS)],
        {"a": ([B, W], T.UINT8), "b": ([B, W], T.UINT8)},
        consts=scales,
    )
    assert found.flops() == 9 * B * W


def test_a_foreign_op_is_named_and_never_zero(analyse: Any, node: Any) -> None:
    """It is unknown, it is a kernel with bytes, and what follows it is unknown too, each with a reason."""
    nodes = [node("Frobnicate", "x", "f", domain="my.company", name="f"), node("Relu", "f", "y")]
    found = analyse(nodes, {"x": [4, 4]}, extra_opsets={"my.company": 1})
    assert dict(found.program.unknown) == {"my.company.Frobnicate": 1, "onnx.Relu": 1}
    assert all(o.cost is None for o in found.program.ops)
    assert found.program.ops[0].reads == 64
    assert "my.company.Frobnicate: no rule counts this op" in found.notes
    assert "onnx.Relu: the shape of an input is not known" in found.notes


def test_declared_shapes_carry_on_past_a_foreign_op(analyse: Any, node: Any) -> None:
    import onnx

    path = analyse.save(
        [node("Frobnicate", "x", "f", domain="my.company"), node("Relu", "f", "y")],
        {"x": ["batch", 4]},
        extra_opsets={"my.company": 1},
    )
    model = onnx.load(path)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("f", T.FLOAT, ["batch", 9]))
    path.write_bytes(model.SerializeToString())
    from optpass.passes.onnx_roofline import program_of_onnx

    program, _ = program_of_onnx(path, dims={"batch": 3})
    assert dict(program.unknown) == {"my.company.Frobnicate": 1}
    assert program.ops[1].cost is not None and program.ops[1].cost.flops == 27
