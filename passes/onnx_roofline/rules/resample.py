"""Interpolation and sampling of grids."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from optpass.passes.onnx_roofline.builder import meta_of
from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.registry import register

_LINEAR = {1: "upsample_linear1d.vec", 2: "upsample_bilinear2d.vec", 3: "upsample_trilinear3d.vec"}


@register("Resize", "Upsample")
def _resize(c: Call) -> Result:
    """Counted by the axes whose size changes; an image kept in size is copied."""
    x, out, mode = c.t(0), c.out(), c.attr("mode", "nearest")
    scaled = [d for d, (a, b) in enumerate(zip(meta_of(x).shape, out.shape, strict=True)) if a != b]
    if not scaled:
        return c.emit("clone", x)
    if mode == "nearest":
        return c.emit("upsample_nearest2d.vec", x, list(out.shape), None)
    if len(scaled) == 2 and c.attr("antialias", 0):
        return _antialiased(c, x, scaled, "_upsample_bilinear2d_aa" if mode == "linear" else "_upsample_bicubic2d_aa")
    if mode == "cubic" and len(scaled) == 2:
        return c.emit("upsample_bicubic2d.vec", x, list(out.shape), False, None)
    if mode == "linear" and len(scaled) in _LINEAR and not c.attr("antialias", 0):
        return c.emit(_LINEAR[len(scaled)], x, list(out.shape), False, None)
    raise NotKnown(f"torch has no {mode} interpolation along {len(scaled)} axes to count it by")


def _antialiased(c: Call, x: fx.Node, scaled: list[int], name: str) -> fx.Node:
    """The op's formula wants images last and planes first; a stand-in of those sizes carries the cost."""
    meta, out = meta_of(x), c.out()
    planes = prod(s for d, s in enumerate(meta.shape) if d not in scaled)

    def image(t: torch.Tensor) -> torch.Tensor:
        return torch.empty((planes, 1, *(t.shape[d] for d in scaled)), dtype=t.dtype, device="meta")

    source = c.b.emit("_to_copy", x, out=image(meta))
    c.b.emit(name, source, [out.shape[d] for d in scaled], False, out=image(out))
    return c.b.collapse(out)


_MODES = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}


@register("GridSample")
def _grid_sample(c: Call) -> Result:
    x, grid = c.t(0), c.t(1)
    name = "grid_sampler_3d" if meta_of(x).dim() == 5 else "grid_sampler_2d"
    return c.emit(name, x, grid, _MODES[c.attr("mode", "linear")], 0, bool(c.attr("align_corners", 0)))


@register("AffineGrid")
def _affine_grid(c: Call) -> Result:
    return c.emit("affine_grid_generator", c.t(0))
