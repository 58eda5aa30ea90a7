"""Pooling and regions of interest."""

from __future__ import annotations

from math import prod

import torch

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.registry import register


def _spatial(c: Call) -> list[int]:
    return list(range(2, meta_of(c.t(0)).dim()))


@register("AveragePool", "MaxPool")
def _pool(c: Call) -> Result:
    kernel = list(c.attr("kernel_shape"))
    rank = min(len(kernel), 3)  # the name stops at 3 dimensions; the count goes by the kernel
    if c.op == "AveragePool":
        return c.emit(f"avg_pool{rank}d", c.t(0), kernel)
    if c.wants(1):
        name = f"max_pool{rank}d_with_indices" if rank > 1 else "max_pool1d_with_indices"
        return c.b.parts_or_none(c.emit(name, c.t(0), kernel, out=c.outs()))
    return c.emit(f"max_pool{rank}d", c.t(0), kernel)


@register("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global(c: Call) -> Result:
    x, dims = c.t(0), _spatial(c)
    if c.op == "GlobalLpPool":
        return c.b.reduce("linalg_vector_norm", x, dims, first=(c.attr("p", 2),))
    return c.b.reduce("mean.dim" if c.op == "GlobalAveragePool" else "amax", x, dims)


@register("LpPool")
def _lp_pool(c: Call) -> Result:
    """The norm of every window, windows laid out as rows."""
    x, out, taps = c.t(0), c.out(), prod(c.attr("kernel_shape"))
    windows = torch.empty((out.numel(), taps), dtype=out.dtype, device="meta")
    c.b.reduce("linalg_vector_norm", c.emit("im2col", x, out=windows), [-1], first=(c.attr("p", 2),))
    return c.b.collapse(out)


@register("MaxUnpool")
def _unpool(c: Call) -> Result:
    return c.emit("max_unpool2d", c.t(0), c.t(1))


@register("RoiAlign")
def _roi_align(c: Call) -> Result:
    """sampling_ratio^2 bilinear samples per output place and channel, then their mean or maximum."""
    x, out, ratio = c.t(0), c.out(), int(c.attr("sampling_ratio", 0))
    if ratio < 1:
        raise NotKnown("with sampling_ratio 0 the number of samples hangs on the regions")
    rois, channels, height, width = out.shape
    fine = (rois, channels, height * ratio, width * ratio)
    places = c.b.zeros((rois, *fine[2:], 2), out.dtype)
    regions = c.b.zeros((rois, *meta_of(x).shape[1:]), out.dtype)
    samples = c.b.emit(
        "grid_sampler_2d", regions, places, 0, 0, True, out=torch.empty(fine, dtype=out.dtype, device="meta")
    )
    name = "avg_pool2d" if c.attr("mode", "avg") == "avg" else "max_pool2d"
    c.b.emit(name, samples, [ratio, ratio], out=out)
    c.b.emit("alias", x, out=meta_of(x))  # the features are read, in place of the stand-ins above
    c.b.emit("alias", c.t(1), out=meta_of(c.t(1)))
    return c.b.collapse(out)
