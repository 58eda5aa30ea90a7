"""Quantisation: to and from integers, and elementwise ops on quantised values. Products are in matmul.py."""

from __future__ import annotations

import torch

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call, Result
from optpass.passes.onnx_roofline.rules.norm import optional
from optpass.passes.onnx_roofline.rules.registry import MICROSOFT, register


@register("QuantizeLinear")
@register("QuantizeLinear", domain=MICROSOFT)
def _quantize(c: Call) -> Result:
    return c.emit("quantize_per_tensor", *(c.t(i) for i in range(len(c.inputs)) if c.has(i)))


@register("DequantizeLinear")
@register("DequantizeLinear", "DequantizeBFP", domain=MICROSOFT)
def _dequantize(c: Call) -> Result:
    return c.emit("dequantize.self", *(c.t(i) for i in range(len(c.inputs)) if c.has(i)))


@register("DynamicQuantizeLinear")
def _dynamic(c: Call) -> Result:
    """Minimum and maximum, scale and zero point, then quantised by them."""
    x = c.t(0)
    chosen = c.emit("_choose_qparams_per_tensor", x, out=(c.out(1), c.out(2)))
    scale, zero = c.b.parts(chosen)
    return [c.emit("quantize_per_tensor", x, scale, zero), scale, zero]


@register("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def _qbinary(c: Call) -> Result:
    """Dequantise both, combine, quantise: inputs are a, its scale and zero point, b, ..."""
    a, b = (c.b.emit("dequantize.self", c.t(i), out=_floating(c, i)) for i in (0, 3))
    total = c.b.map("add" if c.op == "QLinearAdd" else "mul", a, b)
    return c.emit("quantize_per_tensor", total)


@register("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT)
def _qunary(c: Call) -> Result:
    x = c.b.emit("dequantize.self", c.t(0), out=_floating(c, 0))
    return c.emit("quantize_per_tensor", c.b.map("sigmoid" if c.op == "QLinearSigmoid" else "leaky_relu", x))


@register("QLinearConcat", domain=MICROSOFT)
def _qconcat(c: Call) -> Result:
    """Inputs: y's scale and zero point, then (x, scale, zero point) each; all brought to y's scale."""
    parts = [c.b.emit("dequantize.self", c.t(i), out=_floating(c, i)) for i in range(2, len(c.inputs), 3)]
    return c.emit("quantize_per_tensor", c.emit("cat", parts, c.attr("axis", 0), out=_like(c.out())))


@register("QLinearGlobalAveragePool", "QLinearAveragePool", domain=MICROSOFT)
def _qpool(c: Call) -> Result:
    x = c.b.emit("dequantize.self", c.t(0), out=_floating(c, 0))
    if c.op == "QLinearGlobalAveragePool":
        last = bool(c.attr("channels_last", 0))
        dims = list(range(1, meta_of(x).dim() - 1)) if last else list(range(2, meta_of(x).dim()))
        return c.emit("quantize_per_tensor", c.b.reduce("mean.dim", x, dims))
    pooled = c.emit("avg_pool2d", x, list(c.attr("kernel_shape")), out=_like(c.out()))
    return c.emit("quantize_per_tensor", pooled)


@register("GatherBlockQuantized", domain=MICROSOFT)
def _gather_blocks(c: Call) -> Result:
    """Rows of a quantised table, dequantised."""
    rows = torch.empty(c.out().shape, dtype=meta_of(c.t(0)).dtype, device="meta")
    gathered = c.emit("index_select", c.t(0), c.attr("gather_axis", 0), c.t(1), out=rows)
    scale = optional(c, 2)
    return c.emit("dequantize.self", gathered, *([scale] if scale is not None else []))


def _floating(c: Call, index: int) -> torch.Tensor:
    return _like(meta_of(c.t(index)))


def _like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=torch.float32, device="meta")
