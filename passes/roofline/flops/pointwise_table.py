"""FLOPs per output element of every pointwise op whose count does not hang on its arguments.

Here: data only, (flops, how many of them transcendental), with the derivation of each fused op beside it. Not
here: counts that depend on arguments (pointwise.py). A library function (exp, erf, lgamma, a Bessel function)
counts 1, and so do compare, select, abs, negate, round, min, max and a clamp; a logical or integer operation
counts as a floating one.
"""

from __future__ import annotations

from optpass.passes.roofline.flops.registry import words

_ARITHMETIC = words("""
abs absolute neg negative sign sgn ceil floor round special_round trunc fix frac positive copysign signbit
nextafter mul multiply true_divide reciprocal square maximum minimum fmax fmin relu relu6 hardtanh clamp clip
clamp_min clamp_max heaviside eq ne not_equal lt less le less_equal gt greater ge greater_equal isnan isfinite
isinf isneginf isposinf isreal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or
bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
__iand__ __ior__ __ixor__ __ilshift__ __irshift__ shift_left shift_right_arithmetic where masked_fill gcd lcm
deg2rad rad2deg ldexp frexp conj_physical _conj_physical tril triu _masked_scale
""")

_LIBRARY = words("""
exp exp2 expm1 special_expm1 special_exp2 log log2 log10 log1p special_log1p sqrt rsqrt cbrt sin cos tan asin
acos atan arcsin arccos arctan atan2 arctan2 sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh erf erfc
erfinv erf_inv erfcx special_erf special_erfc special_erfinv special_erfcx hypot float_power angle lgamma
digamma polygamma mvlgamma igamma igammac special_gammaln special_digamma special_psi special_polygamma
special_gammainc special_gammaincc special_multigammaln special_zeta zeta ndtri special_ndtri special_log_ndtr
special_ndtr i0 special_i0 special_i0e special_i1 special_i1e bessel_i0 bessel_i0e bessel_i1 bessel_i1e
bessel_j0 bessel_j1 special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
spherical_bessel_j0 special_airy_ai special_chebyshev_polynomial_t special_chebyshev_polynomial_u
special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
special_laguerre_polynomial_l special_legendre_polynomial_p _standard_gamma_grad _dirichlet_grad
""")

#: op: (flops, transcendental). The comment is the sum.
_FUSED: dict[str, tuple[int, int]] = {
    "fma": (2, 0),  # multiply, add
    "fmod": (4, 0),  # a - b * trunc(a / b)
    "remainder": (4, 0),  # a - b * floor(a / b)
    "floor_divide": (2, 0),  # divide, floor
    "lerp": (3, 0),  # a + w * (b - a)
    "nan_to_num": (6, 0),  # three tests, three selects
    "isclose": (6, 0),  # |a - b| <= atol + rtol * |b|: subtract, abs, abs, multiply, add, compare
    "sinc": (5, 1),  # multiply by pi, sin, divide, compare with 0, select
    "special_sinc": (5, 1),
    "logaddexp": (7, 2),  # max + log1p(exp(-|a - b|)): max, subtract, abs, negate, exp, log1p, add
    "logaddexp2": (7, 2),
    "xlogy": (4, 1),  # log, multiply, compare x with 0, select
    "special_xlogy": (4, 1),
    "special_xlog1py": (4, 1),
    "special_entr": (5, 1),  # log, multiply, negate, compare, select
    "logit": (3, 1),  # log(x / (1 - x))
    "special_logit": (3, 1),
    "logit_backward": (3, 0),  # grad / (x * (1 - x))
    "polar": (4, 2),  # r cos, r sin
    # activations
    "sigmoid": (4, 1),  # 1 / (1 + exp(-x)): negate, exp, add, divide
    "special_expit": (4, 1),
    "sigmoid_backward": (3, 0),  # grad * y * (1 - y)
    "tanh_backward": (3, 0),  # grad * (1 - y * y)
    "silu": (4, 1),  # x / (1 + exp(-x))
    "silu_backward": (9, 1),  # s = sigmoid 4; grad * s * (1 + x * (1 - s)) 5
    "mish": (4, 3),  # x * tanh(log1p(exp(x)))
    "mish_backward": (13, 4),  # s = sigmoid 4; t = tanh(log1p(exp x)) 3; grad * (t + x * s * (1 - t * t)) 6
    "leaky_relu": (3, 0),  # compare, multiply, select
    "leaky_relu_backward": (3, 0),
    "prelu": (3, 0),
    "_prelu_kernel": (3, 0),
    "_prelu_kernel_backward": (5, 0),  # compare; w * g, select; x * g, select
    "rrelu": (3, 0),
    "threshold": (2, 0),  # compare, select
    "threshold_backward": (2, 0),
    "hardtanh_backward": (4, 0),  # two compares, or, select
    "hardshrink": (4, 0),  # two compares, or, select
    "hardshrink_backward": (4, 0),
    "softshrink": (6, 0),  # two compares, two shifts, two selects
    "softshrink_backward": (4, 0),  # two compares, or, select
    "hardsigmoid": (3, 0),  # add 3, clamp, divide by 6
    "hardsigmoid_backward": (5, 0),  # two compares, and, multiply by 1/6, select
    "hardswish": (4, 0),  # hardsigmoid, multiply
    "hardswish_backward": (7, 0),  # two compares, x / 3, + 0.5, * grad, two selects
    "elu": (6, 1),  # compare; positive: x * scale; negative: expm1(x * c) * (alpha * scale) 3; select
    "elu_backward": (
        7,
        1,
    ),  # compare; grad * scale; grad * c * alpha * exp(x * c) 4, constants folded; select
    "celu": (6, 1),
    "selu": (6, 1),
    "softplus": (6, 2),  # beta * x, exp, log1p, / beta, compare, select
    "softplus_backward": (7, 1),  # beta * x, exp, grad * z / (z + 1) 3, compare, select
    "log_sigmoid": (6, 2),  # min(0, x) - log1p(exp(-|x|)): min, abs, negate, exp, log1p, subtract
    "log_sigmoid_forward": (6, 2),
    # compare, two selects, abs, negate, exp, add, divide, (m - s * that) 2, times grad
    "log_sigmoid_backward": (11, 1),
    "native_dropout_backward": (2, 0),  # grad * mask * scale
    "infinitely_differentiable_gelu_backward": (11, 2),
    # quantisation
    "quantize_per_tensor": (4, 0),  # divide, round, add the zero point, clamp
    "dequantize_per_tensor": (2, 0),  # subtract the zero point, multiply
    "_add_relu": (2, 0),
    "linalg_cross": (3, 0),  # each component is a * b - c * d
    "cross": (3, 0),
}

#: Operations on complex numbers in real ones, where they differ from twice the real count.
COMPLEX: dict[str, int] = {
    "mul": 6,
    "multiply": 6,
    "square": 6,
    "div": 11,  # by the conjugate: 6 multiplies, 3 adds, 2 divides
    "true_divide": 11,
    "reciprocal": 6,  # conj(z) / |z|^2: 2 multiplies, add, negate, 2 divides
    "abs": 4,  # sqrt(a * a + b * b)
    "angle": 1,
    "neg": 2,
    "conj_physical": 1,
    "_conj_physical": 1,
    "where": 1,
    "masked_fill": 1,
    "polar": 4,
    "lerp": 10,  # subtract 2, multiply 6, add 2
}


def per_element() -> dict[str, tuple[int, int]]:
    """The whole table: op name without namespace -> (flops, transcendental) per output element."""
    table = dict.fromkeys(_ARITHMETIC, (1, 0))
    table |= dict.fromkeys(_LIBRARY, (1, 1))
    return table | _FUSED
