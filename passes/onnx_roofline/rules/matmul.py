"""Matrix products and convolutions, float and quantised. Scales, zero points and biases are epilogues."""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import aten, meta_of
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.norm import optional
from optpass.passes.onnx_roofline.rules.pointwise import swish
from optpass.passes.onnx_roofline.rules.registry import MICROSOFT, register


def _product(c: Call, a: fx.Node, b: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    """a @ b; the bias is the epilogue's."""
    left, right = meta_of(a).shape, meta_of(b).shape
    if not left or not right or left[-1] != right[-2 if len(right) > 1 else 0]:
        raise NotKnown(f"{list(left)} and {list(right)} do not multiply")
    return c.emit("matmul", a, b) if bias is None else c.emit("addmm", bias, a, b)


@register("MatMul", "MatMulInteger")
@register("DynamicQuantizeMatMul", "MatMulIntegerToFloat", domain=MICROSOFT)
def _matmul(c: Call) -> Result:
    return _product(c, c.t(0), c.t(1))


@register("QLinearMatMul")
@register("QGemm", domain=MICROSOFT)
def _qlinear_matmul(c: Call) -> Result:
    """Inputs: a, its scale and zero point, b, ..."""
    a = _flipped(c, c.t(0), c.attr("transA", 0))
    return _product(c, a, _flipped(c, c.t(3), c.attr("transB", 0)))


def _flipped(c: Call, x: fx.Node, transpose: int) -> fx.Node:
    rank = meta_of(x).dim()
    if not transpose or rank < 2:
        return x
    return c.b.permute(x, [*range(rank - 2), rank - 1, rank - 2])


def _batch_flipped(c: Call, x: fx.Node, transpose: int) -> fx.Node:
    """transBatchA of FusedMatMul: the first dim goes last but one."""
    rank = meta_of(x).dim()
    return c.b.permute(x, [*range(1, rank - 1), 0, rank - 1]) if transpose and rank > 2 else x


@register("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def _fused_matmul(c: Call) -> Result:
    sides = []
    for index, side in ((0, "A"), (1, "B")):
        x = _batch_flipped(c, c.t(index), c.attr(f"transBatch{side}", 0))
        sides.append(_flipped(c, x, c.attr(f"trans{side}", 0)))
    return _product(c, sides[0], sides[1])


@register("Gemm")
@register("FusedGemm", domain=MICROSOFT)
def _gemm(c: Call) -> Result:
    a, b = _flipped(c, c.t(0), c.attr("transA", 0)), _flipped(c, c.t(1), c.attr("transB", 0))
    return _product(c, a, b, optional(c, 2))


@register("MatMulNBits", "MatMulBnb4", domain=MICROSOFT)
def _packed_matmul(c: Call) -> Result:
    """A times a block-quantised weight; dequantising it is part of the kernel, as in _weight_int4pack_mm."""
    return c.emit("_weight_int4pack_mm", c.t(0), c.t(1), c.attr("block_size", 32), c.t(2))


@register("Einsum")
def _einsum(c: Call) -> Result:
    """One contraction per pair of operands; the equation's rule needs each operand's sizes alone."""
    return c.emit("einsum", c.attr("equation"), [c.t(i) for i in range(len(c.inputs))])


def convolve(
    c: Call, x: fx.Node, w: fx.Node, bias: fx.Node | None, groups: int, out: torch.Tensor, transposed: bool = False
) -> fx.Node:
    """aten.convolution; strides, padding and dilation show in `out` alone."""
    rank, channels = meta_of(w).dim() - 2, meta_of(x).shape[1]
    if channels != meta_of(w).shape[0 if transposed else 1] * (1 if transposed else groups):
        raise NotKnown(f"a weight {list(meta_of(w).shape)} in {groups} groups does not fit {channels} channels")
    ones, zeros = [1] * rank, [0] * rank
    return c.emit("convolution", x, w, bias, ones, zeros, ones, transposed, zeros, groups, out=out)


@register("Conv", "ConvTranspose")
@register("FusedConv", domain=MICROSOFT)
def _conv(c: Call) -> Result:
    transposed = c.op == "ConvTranspose"
    y = convolve(c, c.t(0), c.t(1), optional(c, 2), c.attr("group", 1), c.out(), transposed)
    return c.b.map("add", y, c.t(3)) if c.op == "FusedConv" and c.has(3) else y


@register("ConvInteger")
def _conv_integer(c: Call) -> Result:
    return convolve(c, c.t(0), c.t(1), None, c.attr("group", 1), c.out())


@register("QLinearConv")
def _qlinear_conv(c: Call) -> Result:
    return convolve(c, c.t(0), c.t(3), optional(c, 8), c.attr("group", 1), c.out())


@register("NhwcConv", domain=MICROSOFT)
def _nhwc_conv(c: Call) -> Result:
    """Channels last; the sizes of the product are those of the channels-first form."""
    x = c.t(0)
    rank = meta_of(x).dim()
    first = [0, rank - 1, *range(1, rank - 1)]
    w = c.b.permute(c.t(1), first)
    out = c.out().permute(first)
    y = convolve(c, c.b.permute(x, first), w, optional(c, 2), c.attr("group", 1), out)
    return c.b.permute(y, [0, *range(2, rank), 1])


@register("CausalConvWithState")
def _causal_conv(c: Call) -> Result:
    """Depthwise over the carried state and the input joined; the new state is the tail of that."""
    x, w = c.t(0), c.t(1)
    meta, taps = meta_of(x), meta_of(w).shape[-1]
    n, channels, length = meta.shape
    past = optional(c, 3) or c.b.zeros((n, channels, taps - 1), meta.dtype)
    joined_meta = torch.empty((n, channels, length + taps - 1), dtype=meta.dtype, device="meta")
    joined = c.b.emit("cat", [past, x], -1, out=joined_meta)
    y = convolve(c, joined, w, optional(c, 2), channels, c.out())
    if c.attr("activation", "none") != "none":
        y = swish(c, y, 1.0)
    if not c.wants(1):
        return y
    return [y, c.b.slice(joined, 2, length, length + taps - 1)]


@register("DeformConv")
def _deform_conv(c: Call) -> Result:
    """Bilinear samples at every tap of every output place (times the mask, if any), then the products."""
    x, w, out = c.t(0), c.t(1), c.out()
    n, channels = meta_of(x).shape[:2]
    kernel = meta_of(w).shape[2:]
    if len(kernel) != 2:
        raise NotKnown("it is known for two spatial dimensions only")
    offsets = int(c.attr("offset_group", 1))
    rows, cols = out.shape[2] * kernel[0], out.shape[3] * kernel[1]
    like = meta_of(x)
    x = c.b.reshape(x, (n * offsets, channels // offsets, *like.shape[2:]))
    grid = c.b.reshape(c.t(2), (n * offsets, rows, cols, 2))
    sampled = torch.empty((n * offsets, channels // offsets, rows, cols), dtype=like.dtype, device="meta")
    y = c.b.emit("grid_sampler_2d", x, grid, 0, 0, True, out=sampled)
    if c.has(4):
        y = c.b.map("mul", y, c.b.reshape(c.t(4), (n * offsets, 1, rows, cols)))
    convolve(c, c.b.reshape(y, (n, channels, rows, cols)), w, optional(c, 3), c.attr("group", 1), out)
    return c.b.collapse(out)


@register("Det")
def _det(c: Call) -> Result:
    return c.emit("linalg_det", c.t(0))


@register("Inverse", domain=MICROSOFT)
def _inverse(c: Call) -> Result:
    return c.b.call(aten("linalg_inv"), (c.t(0),), {}, c.out())
