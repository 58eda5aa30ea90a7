"""Convolutions, forward and backward, of any rank, grouped, strided, dilated, padded and transposed.

Forward: 2 * output elements * (C_in / groups) * prod(kernel); transposed: 2 * input elements * (C_out /
groups) * prod(kernel). Taps that fall on padding (transposed: products cropped away) are counted, as the
dense algorithms compute them; bias is an epilogue and not counted. Each of the two gradients costs as much as
the forward; the bias gradient is a sum of grad_output. Not here: pooling, unfold.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import mac_factor, numel, shape


def conv_cost(x: Any, weight: Any, out: Any, transposed: bool, groups: int, times: int = 1) -> OpCost:
    """`times` products of the size of the forward. weight: (C_out, C_in/g, *k), transposed (C_in, C_out/g,
    *k).
    """
    w = shape(weight)
    taps = prod(w[1:])
    points = numel(x) if transposed else numel(out)
    flops = 2 * points * taps * mac_factor((x, weight)) * times
    rows = points // max(w[0], 1)  # N * spatial size of the side with w[0] channels
    mnk = (rows, taps, w[0] // groups) if transposed else (rows, w[0] // groups, taps)
    return OpCost(flops, "conv", mnk, groups)


@register(
    "convolution",
    "_convolution",
    "convolution_overrideable",
    "conv1d",
    "conv2d",
    "conv3d",
    "_convolution_mode",
    "cudnn_convolution",
    "cudnn_convolution_relu",
    "cudnn_convolution_add_relu",
    "miopen_convolution",
    "miopen_convolution_relu",
    "miopen_convolution_add_relu",
    "miopen_depthwise_convolution",
    "mkldnn_convolution",
    "_mps_convolution",
    "_nnpack_spatial_convolution",
    "_slow_conv2d_forward",
    "thnn_conv2d",
    "slow_conv3d",
    "slow_conv3d_forward",
    "slow_conv_dilated2d",
    "slow_conv_dilated3d",
    "_conv_depthwise2d",
    "conv_depthwise3d",
)
def _conv(c: Call) -> OpCost:
    return _forward(c.at(0), c.at(1), c.out, bool(c.arg("transposed", False)), c.arg("groups"))


def _forward(x: Any, weight: Any, out: Any, transposed: bool, groups: int | None) -> OpCost:
    w = shape(weight)
    if groups is None and not transposed:  # depthwise ops have no such argument: the channel counts tell
        groups = shape(x)[1 - len(w)] // w[1]
    return conv_cost(x, weight, out, transposed, groups or 1)


@register(
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cudnn_convolution_transpose",
    "miopen_convolution_transpose",
    "_mps_convolution_transpose",
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
    "mkldnn::_convolution_transpose_pointwise",
)
def _conv_transpose(c: Call) -> OpCost:
    # Schemas call the groups "groups" or put nothing (slow_conv_transpose*: always 1).
    return conv_cost(c.at(0), c.at(1), c.out, True, c.arg("groups") or 1)


@register("mkldnn::_convolution_pointwise")
def _conv_pointwise(c: Call) -> OpCost:
    # The fused activation or addition is an epilogue, as a bias is.
    name = "X" if "X" in c.names else c.names[0]
    return conv_cost(c.arg(name), c.arg("W"), c.out, False, c.arg("groups") or 1)


@register(
    "onednn::qconv_pointwise",
    "onednn::qconv1d_pointwise",
    "onednn::qconv2d_pointwise",
    "onednn::qconv3d_pointwise",
)
def _qconv(c: Call) -> OpCost:
    return conv_cost(c.arg("qx"), c.arg("qw"), c.out, False, c.arg("groups") or 1)


@register("convolution_backward", "convolution_backward_overrideable")
def _conv_backward(c: Call) -> OpCost:
    grad, x, weight, mask = c.at(0), c.at(1), c.at(2), c.arg("output_mask")
    transposed, groups = bool(c.arg("transposed")), c.arg("groups")
    return _backward(grad, x, weight, transposed, groups, mask)


def _backward(grad: Any, x: Any, weight: Any, transposed: bool, groups: int, mask: Any) -> OpCost:
    times = bool(mask[0]) + bool(mask[1])
    forward = conv_cost(x, weight, grad, transposed, groups, times)
    bias = numel(grad) if len(mask) > 2 and mask[2] else 0
    assert forward.mnk is not None
    m, n, k = forward.mnk
    mnk = (m, k, n) if mask[0] else (n, k, m)  # dX = dY W^T, else dW = dY^T X
    return OpCost(forward.flops + bias, "conv", mnk if times else None, groups)


@register("_slow_conv2d_backward")
def _slow_backward(c: Call) -> OpCost:
    return _backward(c.at(0), c.at(1), c.at(2), False, 1, c.arg("output_mask") or (True, True, True))


@register("mps_convolution_backward")
def _mps_backward(c: Call) -> OpCost:
    return _backward(c.at(1), c.at(0), c.at(2), False, c.arg("groups"), c.arg("output_mask"))


@register("mps_convolution_transpose_backward")
def _mps_transpose_backward(c: Call) -> OpCost:
    return _backward(c.at(1), c.at(0), c.at(2), True, c.arg("groups"), c.arg("output_mask"))


@register("conv_tbc")
def _conv_tbc(c: Call) -> OpCost:
    # weight: (kernel, C_in, C_out); time and batch lead.
    taps, c_in, c_out = shape(c.at(1))
    rows = numel(c.out) // max(c_out, 1)
    return OpCost(2 * rows * c_out * taps * c_in, "conv", (rows, c_out, taps * c_in))


@register("conv_tbc_backward")
def _conv_tbc_backward(c: Call) -> OpCost:
    grad = c.at(0)
    taps, c_in, c_out = shape(c.at(2))
    rows = numel(grad) // max(c_out, 1)
    return OpCost(2 * 2 * rows * c_out * taps * c_in + numel(grad), "conv", (rows, taps * c_in, c_out))
