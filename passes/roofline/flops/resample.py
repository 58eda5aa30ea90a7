"""Interpolation and grid sampling. Coordinates and weights of a separable grid are per axis and not counted.

Linear in d dims: 2^d - 1 interpolations of 3 (a + w (b - a)); cubic: five filters of four taps, 7 each.
Backward, the adjoint: multiply and add per tap. Nearest: a gather, backward one add per gradient element. Not
here: pooling.
"""

from __future__ import annotations

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, numel, shape

_NEAREST = [f"{n}{d}d" for n in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3)]
_FORWARD = {
    "upsample_linear1d": 3,
    "upsample_bilinear2d": 9,
    "upsample_trilinear3d": 21,
    "upsample_bicubic2d": 35,
}
_BACKWARD = {
    "upsample_linear1d": 4,
    "upsample_bilinear2d": 8,
    "upsample_trilinear3d": 16,
    "upsample_bicubic2d": 32,
}


@register(*_NEAREST, "pixel_shuffle", "pixel_unshuffle")
def _nearest(c: Call) -> OpCost:
    return OpCost(0, "indexing")


@register(*(f"{name}_backward" for name in _NEAREST))
def _nearest_backward(c: Call) -> OpCost:
    return OpCost(first_numel(c.at(0)), "indexing")


@register(*_FORWARD)
def _interpolate(c: Call) -> OpCost:
    return OpCost(_FORWARD[c.base] * numel(c.out), "pointwise")


@register(*(f"{name}_backward" for name in _BACKWARD))
def _interpolate_backward(c: Call) -> OpCost:
    return OpCost(_BACKWARD[c.base.removesuffix("_backward")] * first_numel(c.at(0)), "pointwise")


#: Half-width of the filter, in output pixels when shrinking.
_AA = {"_upsample_bilinear2d_aa": 1, "_upsample_bicubic2d_aa": 2, "_upsample_lanczos2d_aa": 3}


def _aa_taps(c: Call, small_to_large: bool) -> int:
    """Anti-aliased filters: taps per axis are 2 * support * max(scale, 1); separable, rows first, multiply-
    add per tap.
    """
    half = _AA[c.base.removesuffix("_backward")]
    if small_to_large:  # backward: (grad_output, output_size, input_size, ...)
        out, source = shape(c.at(0)), tuple(c.arg("input_size"))
    else:
        out, source = shape(c.out), shape(c.at(0))
    taps_h, taps_w = (2 * half * max(-(-source[d] // max(out[d], 1)), 1) for d in (-2, -1))
    planes = out[0] * out[1]
    # Horizontal pass over all source rows, vertical pass over the output.
    return int(2 * planes * (source[-2] * out[-1] * taps_w + out[-2] * out[-1] * taps_h))


@register(*_AA)
def _antialias(c: Call) -> OpCost:
    return OpCost(_aa_taps(c, False), "pointwise")


@register(*(f"{name}_backward" for name in _AA))
def _antialias_backward(c: Call) -> OpCost:
    return OpCost(_aa_taps(c, True), "pointwise")


_BILINEAR, _NEAREST_MODE, _BICUBIC = 0, 1, 2


def _grid(rank: int, mode: int) -> tuple[int, int, int, int]:
    """(per point, per channel forward, per channel for grad input, per channel for grad grid).

    Per point: unnormalise 4 per dim ((x + 1) * size - 1) / 2, floor 1 per dim; linear: two fractions per dim
    and 2^d weights of d - 1 products; cubic: fraction 1 and four weights 22 per dim (two polynomials of 5 and
    of 6). Per channel: a weighted sum of the taps; backward a multiply-add per tap, and 3 per tap and dim for
    the grid.
    """
    base = 5 * rank
    if mode == _NEAREST_MODE:
        return base, 0, 1, 0
    if mode == _BICUBIC:
        return base + 23 * rank, 35, 32, 3 * 16 * rank
    taps = 2**rank
    return base + 2 * rank + taps * (rank - 1), 2 * taps - 1, 2 * taps, 3 * taps * rank


@register(
    "grid_sampler",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "cudnn_grid_sampler",
    "_grid_sampler_2d_cpu_fallback",
)
def _sample(c: Call) -> OpCost:
    x, grid = c.at(0), c.at(1)
    rank = shape(grid)[-1]
    point, channel, _, _ = _grid(rank, int(c.arg("interpolation_mode", _BILINEAR)))
    points = numel(grid) // rank
    return OpCost(points * (point + channel * shape(x)[1]), "pointwise")


@register(
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "cudnn_grid_sampler_backward",
    "_grid_sampler_2d_cpu_fallback_backward",
)
def _sample_backward(c: Call) -> OpCost:
    """(grad_output or input first, by backend); the mask says which gradients; grad grid is scaled by size /
    2 per dim.
    """
    grid = c.arg("grid")
    x = c.arg("input", c.arg("self"))
    rank, mask = shape(grid)[-1], c.arg("output_mask", (True, True))
    point, _, grad_input, grad_grid = _grid(rank, int(c.arg("interpolation_mode", _BILINEAR)))
    per_channel = grad_input * bool(mask[0]) + grad_grid * bool(mask[1])
    per_point = point + per_channel * shape(x)[1] + rank * bool(mask[1])
    return OpCost(numel(grid) // rank * per_point, "pointwise")


@register("affine_grid_generator", "cudnn_affine_grid_generator", "affine_grid_generator_backward")
def _affine_grid(c: Call) -> OpCost:
    """A product of (points x (d + 1)) with ((d + 1) x d) per image; its adjoint costs the same."""
    n = numel(c.out) if "backward" not in c.base else first_numel(c.at(0))
    rank = shape(c.out)[-1] if "backward" not in c.base else shape(c.at(0))[-1]
    return OpCost(2 * n * (rank + 1), "other")
