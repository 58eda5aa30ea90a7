"""Pooling of every rank, forward and backward: each window's taps counted, those on padding included.

Average: taps + 1 (the division) per output, and the same per output backwards. Maximum: taps comparisons per
output; backward one add per output. Adaptive windows are counted exactly, window by window. Not here:
interpolation.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, numel, pair, shape


def _rank(c: Call) -> int:
    digits = [x for x in c.base if x.isdigit()]
    return int(digits[0]) if digits else 2


def _taps(c: Call) -> int:
    return prod(pair(c.arg("kernel_size"), _rank(c)))


@register("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg(c: Call) -> OpCost:
    return OpCost(numel(c.out) * (_taps(c) + 1), "reduction")


@register("avg_pool2d_backward", "avg_pool3d_backward")
def _avg_backward(c: Call) -> OpCost:
    return OpCost(first_numel(c.at(0)) * (_taps(c) + 1), "reduction")


@register(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool1d_with_indices",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "mkldnn_max_pool2d",
    "mkldnn_max_pool3d",
    "quantized_max_pool1d",
    "quantized_max_pool2d",
    "quantized_max_pool3d",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
)
def _max(c: Call) -> OpCost:
    return OpCost(first_numel(c.out) * _taps(c), "reduction")


@register("prims::_low_memory_max_pool_with_offsets")
def _max_with_offsets(c: Call) -> OpCost:
    return OpCost(first_numel(c.out) * prod(c.arg("kernel_size")), "reduction")


@register("prims::_low_memory_max_pool_offsets_to_indices")
def _offsets_to_indices(c: Call) -> OpCost:
    """Per spatial dim: split the offset 1, origin * stride - padding 2, + offset * dilation 2, linearise 2."""
    return OpCost(7 * len(c.arg("kernel_size")) * numel(c.out), "indexing")


@register(
    "max_pool2d_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "mkldnn_max_pool2d_backward",
    "mkldnn_max_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
)
def _max_backward(c: Call) -> OpCost:
    return OpCost(first_numel(c.at(0)), "indexing")


@register("max_unpool2d", "max_unpool3d")
def _unpool(c: Call) -> OpCost:
    return OpCost(0, "indexing")


def adaptive_taps(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    """Taps of all windows of one plane: window i of a dim spans floor(i * in / out) to ceil((i + 1) * in /
    out).
    """

    def along(size: int, bins: int) -> int:
        return sum(-(-(i + 1) * size // bins) - i * size // bins for i in range(bins))

    return prod(along(size, bins) for size, bins in zip(inputs, outputs, strict=True))


def _adaptive(c: Call, large: Any, small: Any, rank: int, divide: bool) -> OpCost:
    wide, narrow = shape(large)[-rank:], shape(small)[-rank:]
    planes = numel(small) // max(prod(narrow), 1)
    taps = planes * adaptive_taps(wide, narrow)
    return OpCost(taps + (numel(small) if divide else 0), "reduction")


@register(
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "mkldnn_adaptive_avg_pool2d",
)
def _adaptive_avg(c: Call) -> OpCost:
    return _adaptive(c, c.at(0), c.out, _rank(c), divide=True)


@register(
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_avg_pool3d_backward",
    "mkldnn_adaptive_avg_pool2d_backward",
)
def _adaptive_avg_backward(c: Call) -> OpCost:
    return _adaptive(c, c.at(1), c.at(0), _rank(c), divide=True)


@register("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(c: Call) -> OpCost:
    out = c.out[0] if isinstance(c.out, list | tuple) else c.out
    return _adaptive(c, c.at(0), out, _rank(c), divide=False)
