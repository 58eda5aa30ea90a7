"""Fused optimiser steps, counted per parameter element from the kernels' formulas
(torch/aten/src/ATen/native/cuda/fused_*).

Here: _fused_adam, _fused_adamw, _fused_sgd, _fused_adagrad, and gradient unscaling. Not here: _foreach_ ops
(pointwise.py).
"""

from __future__ import annotations

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import numel


def _common(c: Call) -> int:
    """Flops every step may begin with: unscale the gradient, negate it to maximise."""
    return (c.arg("grad_scale") is not None) + bool(c.arg("maximize"))


@register("_fused_adam", "_fused_adamw")
def _adam(c: Call) -> OpCost:
    """m = m + (1 - b1)(g - m) 3; v = b2 v + (1 - b2) g g 4; p -= step * m / (sqrt(v) / bias + eps) 6: divide,
    multiply, subtract, sqrt, divide, add. Weight decay 2 (decoupled or not), amsgrad's maximum 1.
    """
    n = numel(c.at(0))
    per = 13 + (2 if c.arg("weight_decay") else 0) + bool(c.arg("amsgrad")) + _common(c)
    return OpCost(per * n, "pointwise", transcendental=n)


@register("_fused_sgd")
def _sgd(c: Call) -> OpCost:
    """p -= lr g 2; weight decay 2; momentum m b + (1 - d) g 3 (2 without dampening; the first step copies);
    nesterov 2.
    """
    per = 2 + (2 if c.arg("weight_decay") else 0) + _common(c)
    if c.arg("momentum"):
        per += 0 if c.arg("is_first_step") else 3 if c.arg("dampening") else 2
        per += 2 if c.arg("nesterov") else 0
    return OpCost(per * numel(c.at(0)), "pointwise")


@register("_fused_adagrad")
def _adagrad(c: Call) -> OpCost:
    """sum += g g 2; p -= lr g / (sqrt(sum) + eps) 5; weight decay 2."""
    n = numel(c.at(0))
    return OpCost((7 + (2 if c.arg("weight_decay") else 0) + _common(c)) * n, "pointwise", transcendental=n)


@register("_amp_foreach_non_finite_check_and_unscale")
def _unscale(c: Call) -> OpCost:
    return OpCost(2 * numel(c.at(0)), "pointwise")  # test, multiply


@register("_amp_update_scale")
def _update_scale(c: Call) -> OpCost:
    return OpCost(4, "other")  # on one scalar: compare, multiply, increment, compare


@register("inductor::accumulate_grad_")
def _accumulate_grad(c: Call) -> OpCost:
    return OpCost(numel(c.at(2)) if c.at(1) is not None else 0, "pointwise")
