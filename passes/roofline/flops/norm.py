"""Normalisations: layer, RMS, group, batch and weight norm in every backend's spelling, and their backwards.

Derivations, for n elements in r groups (rows of a layer norm, channels of a batch norm): forward 6n + 4r:
mean n + r; variance 2n (subtract, square) + n (sum) + r; add eps r, rsqrt r; subtract n, scale n; then n for
a weight and n for a bias. RMS 3n + 3r (+ n). backward: x_hat 2n, where grad_input or grad_weight is wanted;
grad_input = rstd * (g - mean(g) - x_hat * mean(g * x_hat)): 7n + 2r and n for g = grad * weight; grad_weight
2n; grad_bias n. Not here: softmax.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, shape


def _affine(c: Call) -> int:
    return (c.arg("weight") is not None) + (c.arg("bias") is not None)


def _normalise(n: int, r: int, affine: int) -> OpCost:
    return OpCost((6 + affine) * n + 4 * r, "reduction", transcendental=r)


def _gradient(n: int, r: int, weight: bool, mask: Any) -> int:
    """Backward with statistics saved; mask: which of input, weight, bias gradients are wanted."""
    flops = 2 * n if mask[0] or mask[1] else 0
    flops += (7 + weight) * n + 2 * r if mask[0] else 0
    flops += 2 * n if mask[1] else 0
    return flops + (n if len(mask) > 2 and mask[2] else 0)


def _rows(c: Call) -> tuple[int, int]:
    n = first_numel(c.arg("input"))
    return n, n // max(prod(c.arg("normalized_shape")), 1)


@register("layer_norm", "native_layer_norm")
def _layer_norm(c: Call) -> OpCost:
    n, r = _rows(c)
    return _normalise(n, r, _affine(c))


@register("native_layer_norm_backward")
def _layer_norm_backward(c: Call) -> OpCost:
    n, r = _rows(c)
    return OpCost(_gradient(n, r, c.arg("weight") is not None, c.arg("output_mask")), "reduction")


@register("rms_norm", "_fused_rms_norm")
def _rms_norm(c: Call) -> OpCost:
    n, r = _rows(c)
    return OpCost((3 + (c.arg("weight") is not None)) * n + 3 * r, "reduction", transcendental=r)


@register("_fused_rms_norm_backward")
def _rms_norm_backward(c: Call) -> OpCost:
    """x_hat n; grad_input = rstd * (g - x_hat * mean(g * x_hat)): 5n + r (+ n for g); grad_weight 2n."""
    n, r = _rows(c)
    mask = c.arg("output_mask")
    flops = n if mask[0] or mask[1] else 0
    flops += (5 + (c.arg("weight") is not None)) * n + r if mask[0] else 0
    return OpCost(flops + (2 * n if mask[1] else 0), "reduction")


@register("group_norm", "native_group_norm")
def _group_norm(c: Call) -> OpCost:
    x = c.at(0)
    groups = c.arg("num_groups") or c.arg("group")
    return _normalise(first_numel(x), shape(x)[0] * groups, _affine(c))


@register("native_group_norm_backward")
def _group_norm_backward(c: Call) -> OpCost:
    x = c.arg("input")
    weight = c.arg("weight") is not None
    return OpCost(_gradient(first_numel(x), c.arg("N") * c.arg("group"), weight, c.arg("output_mask")), "reduction")


def _channels(x: Any) -> int:
    return shape(x)[1] if len(shape(x)) > 1 else 1


def _batch_norm_cost(c: Call, training: bool) -> OpCost:
    """Training: as above, r = channels, and 7 per channel for the running mean (3) and unbiased variance (4).

    Inference: rsqrt(var + eps) 2 per channel; subtract and scale 2n; weight and bias n each.
    """
    x = c.at(0)
    n, channels = first_numel(x), _channels(x)
    if training:
        cost = _normalise(n, channels, _affine(c))
        running = 7 * channels if c.arg("running_mean") is not None else 0
        return OpCost(cost.flops + running, "reduction", transcendental=channels)
    return OpCost((2 + _affine(c)) * n + 2 * channels, "pointwise", transcendental=channels)


@register(
    "batch_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_batch_norm_impl_index",
)
def _batch_norm(c: Call) -> OpCost:
    # The *_with_update ops have no flag: they exist only to train.
    return _batch_norm_cost(c, bool(c.arg("training", True)))


@register("_native_batch_norm_legit_no_training", "_batch_norm_no_update", "quantized_batch_norm")
def _batch_norm_inference(c: Call) -> OpCost:
    return _batch_norm_cost(c, training=False)


@register("onednn::qbatch_norm2d")
def _qbatch_norm(c: Call) -> OpCost:
    # Dequantise 2n, normalise with weight and bias 4n, requantise 4n.
    x = c.at(0)
    return OpCost(10 * first_numel(x) + 2 * _channels(x), "pointwise", transcendental=_channels(x))


@register(
    "native_batch_norm_backward",
    "batch_norm_backward",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
)
def _batch_norm_backward(c: Call) -> OpCost:
    """Training: as above. Inference: invstd 2r; grad_input = grad * (weight * invstd) n (+ r); grad_weight
    4n; grad_bias n.
    """
    x = c.arg("input")
    n, r, mask = first_numel(x), _channels(x), c.arg("output_mask", (True, True, True))
    weight = c.arg("weight") is not None
    if c.arg("train", c.arg("update", True)):
        return OpCost(_gradient(n, r, weight, mask), "reduction")
    flops = 2 * r if mask[0] or mask[1] else 0
    flops += n + weight * r if mask[0] else 0
    flops += 4 * n if mask[1] else 0
    return OpCost(flops + (n if mask[2] else 0), "reduction", transcendental=r)


@register("batch_norm_stats", "batch_norm_update_stats")
def _batch_norm_stats(c: Call) -> OpCost:
    n, r = first_numel(c.at(0)), _channels(c.at(0))
    running = 7 * r if c.arg("running_mean") is not None else 0
    return OpCost(4 * n + 4 * r + running, "reduction", transcendental=r)


@register("batch_norm_elemt")
def _batch_norm_elemt(c: Call) -> OpCost:
    return OpCost((2 + _affine(c)) * first_numel(c.at(0)), "pointwise")


@register("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
def _batch_norm_gather(c: Call) -> OpCost:
    """Welford's merge over ranks: 8 per rank and channel, then rsqrt(var / n + eps) 3 and 7 for running
    statistics.
    """
    merged, r = first_numel(c.arg("mean")), _channels(c.at(0))
    running = 7 * r if c.arg("running_mean") is not None else 0
    return OpCost(8 * merged + 3 * r + running, "reduction", transcendental=r)


@register("batch_norm_backward_reduce")
def _batch_norm_backward_reduce(c: Call) -> OpCost:
    # sum(dy) n; sum(dy * (x - mean)) 3n; the weight gradient scales the latter, 1 per channel.
    n, r = first_numel(c.arg("input")), _channels(c.arg("input"))
    return OpCost(4 * n + r, "reduction")


@register("batch_norm_backward_elemt")
def _batch_norm_backward_elemt(c: Call) -> OpCost:
    # (dy - mean_dy - (x - mean) * k) * f: 5n; k and f: 5 per channel.
    n, r = first_numel(c.arg("input")), _channels(c.arg("input"))
    return OpCost(5 * n + 5 * r, "pointwise")


@register("_weight_norm", "_weight_norm_interface")
def _weight_norm(c: Call) -> OpCost:
    # norm: 2n + r; g / norm r; v * that n.
    n, r = first_numel(c.at(0)), first_numel(c.at(1))
    return OpCost(3 * n + 2 * r, "reduction", transcendental=r)


@register("_weight_norm_interface_backward", "_weight_norm_differentiable_backward")
def _weight_norm_backward(c: Call) -> OpCost:
    # s = sum(grad * v) 2n; grad_g = s / norm r; grad_v = (g / norm) * (grad - v * s / norm^2): 3n + 3r.
    n, r = first_numel(c.at(0)), first_numel(c.at(2))
    return OpCost(5 * n + 4 * r, "reduction")
