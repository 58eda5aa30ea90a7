"""Random numbers and dropout. A uniform or integer draw counts 1 (the generator's integer mixing is not
counted further).

A normal draw counts 7: draw and Box-Muller (log, * -2, sqrt, * 2 pi, cos, *). native_dropout: draw, compare,
mask, scale: 4. Not here: dropout's backward (pointwise).
"""

from __future__ import annotations

from math import log2

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, numel, shape


def _draws(c: Call, per: int, transcendental: int = 0, extra: int = 0) -> OpCost:
    n = first_numel(c.out) or first_numel(c.at(0))
    return OpCost(per * n + extra, "rng", transcendental=transcendental * n)


@register(
    "rngprims::philox_rand",
    "rand",
    "rand_like",
    "prims::inductor_seeds",
    "prims::inductor_seed",
    "_philox_key_split",
    "_philox_key_fold_in",
)
def _uniform01(c: Call) -> OpCost:
    return _draws(c, 1)


@register("prims::inductor_rand_eager_offset", "prims::inductor_rand_eager_offsets")
def _offset(c: Call) -> OpCost:
    return OpCost(max(numel(c.out), 1), "rng")  # advances the generator: one add each


@register("uniform", "prims::uniform", "_philox_uniform")
def _uniform(c: Call) -> OpCost:
    return _draws(c, 3)  # draw, scale, shift


@register("randint", "randint_like", "random", "prims::inductor_randint")
def _randint(c: Call) -> OpCost:
    return _draws(c, 3)  # draw, modulo the range, shift


@register("randn", "randn_like")
def _randn(c: Call) -> OpCost:
    return _draws(c, 7, 3)


@register("normal", "normal_functional", "prims::normal", "_philox_normal")
def _normal(c: Call) -> OpCost:
    return _draws(c, 9, 3)  # scale and shift


@register("log_normal")
def _log_normal(c: Call) -> OpCost:
    return _draws(c, 10, 4)


@register("prims::inductor_random")
def _inductor_random(c: Call) -> OpCost:
    return _draws(c, 7, 3) if c.arg("mode") == "randn" else _draws(c, 1)


@register("bernoulli")
def _bernoulli(c: Call) -> OpCost:
    return _draws(c, 2)


@register("exponential", "geometric")
def _exponential(c: Call) -> OpCost:
    # draw, log, divide by the rate; geometric: ceil as well
    return _draws(c, 4 if c.base == "geometric" else 3, 1)


@register("cauchy")
def _cauchy(c: Call) -> OpCost:
    return _draws(c, 6, 1)  # draw, - 0.5, * pi, tan, scale, shift


@register("native_dropout", "_fused_dropout")
def _native_dropout(c: Call) -> OpCost:
    if c.base == "native_dropout" and (c.arg("train") is False or c.arg("p") == 0):
        return OpCost(0, "copy")
    return _draws(c, 4)


@register("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(c: Call) -> OpCost:
    """Before dispatch. feature_*: one draw and compare per (sample, channel); alpha_*: an affine map of 3
    more.
    """
    if not c.arg("train") or c.arg("p") == 0:
        return OpCost(0, "view")
    n, sizes = first_numel(c.at(0)), shape(c.at(0))
    masks = sizes[0] * sizes[1] if c.base.startswith("feature") else n
    per = 5 if "alpha" in c.base else 2
    return OpCost(2 * masks + per * n, "rng")


@register("rrelu_with_noise", "rrelu_with_noise_functional")
def _rrelu(c: Call) -> OpCost:
    # compare, multiply, select; training draws the slope (draw, scale, shift)
    return _draws(c, 6 if c.arg("training") else 3)


@register("rrelu_with_noise_backward")
def _rrelu_backward(c: Call) -> OpCost:
    return OpCost((1 if c.arg("training") else 3) * first_numel(c.at(0)), "pointwise")


@register("randperm")
def _randperm(c: Call) -> OpCost:
    # A key per element and a sort of the keys.
    n = numel(c.out)
    flops = n + (n * log2(n) if n > 1 else 0)
    return OpCost(int(flops) if flops == int(flops) else flops, "rng")


@register("multinomial")
def _multinomial(c: Call) -> OpCost:
    """Without replacement: exponential keys p / -log(u) 4 per class, then top-k. With: normalised cumsum 2,
    binary search.
    """
    n, k, classes = first_numel(c.at(0)), numel(c.out), shape(c.at(0))[-1]
    search = log2(classes) if classes > 1 else 0
    if c.arg("replacement"):
        return OpCost(2 * n + k * (1 + search), "rng")
    return OpCost(4 * n + n * search, "rng", transcendental=n)


@register("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
def _rejection(c: Call) -> OpCost:
    """Rejection samplers loop a data-dependent number of times; one round is counted.

    Poisson and binomial by transformed rejection (Hormann 1993): about 20, of which log and two lgamma; gamma
    by Marsaglia and Tsang (2000): normal 7, cube 4, squeeze test 8, logs 2.
    """
    if c.base in ("poisson", "binomial"):
        return _draws(c, 20, 3)
    return _draws(c, 21 if c.base == "_standard_gamma" else 23, 5)
