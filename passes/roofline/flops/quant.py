"""Quantisation: quantise 4 (divide, round, add the zero point, clamp), dequantise 2 (subtract, multiply),
fake quantise 6.

Here: ATen's and PT2E's (quantized_decomposed) ops. Not here: quantised products and convolutions (matmul.py,
conv.py).
"""

from __future__ import annotations

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, numel

_QD = "quantized_decomposed::"
_GRAINS = ("per_tensor", "per_channel", "per_token", "per_channel_group")


def _per_element(c: Call, flops: int) -> OpCost:
    return OpCost(flops * (first_numel(c.out) or first_numel(c.at(0))), "pointwise")


@register("quantize_per_channel", *(f"{_QD}quantize_{g}" for g in _GRAINS))
def _quantize(c: Call) -> OpCost:
    return _per_element(c, 4)


@register("dequantize", *(f"{_QD}dequantize_{g}" for g in _GRAINS))
def _dequantize(c: Call) -> OpCost:
    return _per_element(c, 2)


@register("quantize_per_tensor_dynamic")
def _quantize_dynamic(c: Call) -> OpCost:
    return _per_element(c, 6)  # minimum and maximum first


@register(
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_channel_affine",
    "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_channel_affine",
    f"{_QD}fake_quant_per_channel",
)
def _fake(c: Call) -> OpCost:
    return _per_element(c, 6)


@register(
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)
def _fake_mask(c: Call) -> OpCost:
    return _per_element(c, 9)  # and the mask: two compares, and


@register(
    "fake_quantize_per_tensor_affine_cachemask_backward",
    "fake_quantize_per_channel_affine_cachemask_backward",
)
def _fake_backward(c: Call) -> OpCost:
    return _per_element(c, 1)


@register(
    "_fake_quantize_learnable_per_tensor_affine_backward",
    "_fake_quantize_learnable_per_channel_affine_backward",
)
def _fake_learnable_backward(c: Call) -> OpCost:
    # Quantise again 4, mask 4; scale gradient 4 and its sum, zero-point gradient 2 and its sum.
    return _per_element(c, 16)


@register(
    "_choose_qparams_per_tensor",
    f"{_QD}choose_qparams",
    f"{_QD}choose_qparams_symmetric",
    f"{_QD}choose_qparams_per_token",
    f"{_QD}choose_qparams_per_token_asymmetric",
    f"{_QD}_choose_qparams_per_token_asymmetric_impl",
)
def _choose(c: Call) -> OpCost:
    # Minimum and maximum of the input; then 6 per scale (range, divide, max with eps, zero point 3).
    scales = max(first_numel(c.out), 1)
    return OpCost(2 * first_numel(c.at(0)) + 6 * scales, "reduction")


@register(
    "fused_moving_avg_obs_fake_quant",
    "_fused_moving_avg_obs_fq_helper",
    "_fused_moving_avg_obs_fq_helper_functional",
)
def _observe(c: Call) -> OpCost:
    # Minimum and maximum 2, fake quantise with mask 9; moving averages and scales 12 per channel.
    return OpCost(11 * first_numel(c.at(0)) + 12 * numel(c.arg("scale")), "reduction")


@register(
    "int_repr",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "_make_per_tensor_quantized_tensor",
)
def _storage(c: Call) -> OpCost:
    return OpCost(0, "copy")


@register("_saturate_weight_to_fp16")
def _saturate(c: Call) -> OpCost:
    return _per_element(c, 1)


@register("onednn::qadd", "onednn::qadd_relu", "onednn::qmul")
def _qbinary(c: Call) -> OpCost:
    # Dequantise both 4, combine 1 (relu 1), requantise 4.
    return _per_element(c, 10 if c.base == "qadd_relu" else 9)
