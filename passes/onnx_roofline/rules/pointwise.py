"""Elementwise ops: ONNX name to ATen name as data, and the few whose expansion hangs on attributes."""

from __future__ import annotations

import torch
from torch import fx

from optpass.passes.onnx_roofline.call import Call, NotKnown, Result
from optpass.passes.onnx_roofline.rules.registry import MICROSOFT, register

#: Ops that are one ATen op on the same operands.
SAME: dict[str, str] = {
    "Abs": "abs",
    "Acos": "acos",
    "Acosh": "acosh",
    "Add": "add",
    "And": "logical_and",
    "Asin": "asin",
    "Asinh": "asinh",
    "Atan": "atan",
    "Atanh": "atanh",
    "BitwiseAnd": "bitwise_and",
    "BitwiseNot": "bitwise_not",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Ceil": "ceil",
    "Celu": "celu",
    "Cos": "cos",
    "Cosh": "cosh",
    "Div": "div",
    "Elu": "elu",
    "Equal": "eq",
    "Erf": "erf",
    "Exp": "exp",
    "Floor": "floor",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
    "HardSigmoid": "hardsigmoid",
    "HardSwish": "hardswish",
    "IsNaN": "isnan",
    "LeakyRelu": "leaky_relu",
    "Less": "lt",
    "LessOrEqual": "le",
    "Log": "log",
    "Mish": "mish",
    "Mul": "mul",
    "Neg": "neg",
    "Not": "logical_not",
    "Or": "logical_or",
    "PRelu": "prelu",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Round": "round",
    "Selu": "selu",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Softplus": "softplus",
    "Sqrt": "sqrt",
    "Sub": "sub",
    "Tan": "tan",
    "Tanh": "tanh",
    "ThresholdedRelu": "threshold",
    "Where": "where.self",
    "Xor": "logical_xor",
}
_VARIADIC = {"Max": "maximum", "Min": "minimum", "Sum": "add", "Mean": "add"}


@register(*SAME)
def _same(c: Call) -> Result:
    return c.emit(SAME[c.op], *c.all())


@register(*_VARIADIC)
def _variadic(c: Call) -> Result:
    """n - 1 operations per output; the mean divides as well."""
    operands = c.all()
    if len(operands) == 1:
        return c.emit("alias", operands[0])
    total = operands[0]
    for operand in operands[1:]:
        pair = (total, operand) if isinstance(total, fx.Node) else (operand, total)
        total = c.b.map(_VARIADIC[c.op], *pair)
    if c.op == "Mean":
        total = c.b.map("div", total, len(operands))
    assert isinstance(total, fx.Node)
    return total


@register("Pow")
def _pow(c: Call) -> Result:
    base, exponent = c.a(0), c.a(1)
    if isinstance(exponent, fx.Node):
        return c.emit("pow.Scalar" if not isinstance(base, fx.Node) else "pow.Tensor_Tensor", base, exponent)
    return c.emit("pow.Tensor_Scalar", c.t(0), exponent)


@register("Mod")
def _mod(c: Call) -> Result:
    return c.emit("fmod" if c.attr("fmod", 0) else "remainder", *c.all())


@register("BitShift")
def _shift(c: Call) -> Result:
    return c.emit("bitwise_left_shift" if c.attr("direction") == "LEFT" else "bitwise_right_shift", *c.all())


@register("Clip")
def _clip(c: Call) -> Result:
    bounds = [c.a(i) if c.has(i) else None for i in (1, 2)]
    return c.emit("clamp", c.t(0), *bounds)


@register("Gelu")
@register("Gelu", "FastGelu", "BiasGelu", domain=MICROSOFT)
def _gelu(c: Call) -> Result:
    x = c.t(0)
    if c.has(1):  # a bias
        x = c.b.map("add", x, c.t(1))
    tanh = c.op == "FastGelu" or c.attr("approximate", "none") == "tanh"
    return c.emit("gelu", x, approximate="tanh" if tanh else "none")


def swish(c: Call, x: fx.Node, alpha: float) -> fx.Node:
    """x * sigmoid(alpha * x)."""
    if alpha == 1.0:
        return c.b.map("silu", x)
    return c.b.map("mul", x, c.b.map("sigmoid", c.b.map("mul", x, alpha)))


@register("Swish")
@register("QuickGelu", domain=MICROSOFT)
def _swish(c: Call) -> Result:
    return swish(c, c.t(0), c.attr("alpha", 1.702 if c.op == "QuickGelu" else 1.0))


@register("SwiGLU")
def _swiglu(c: Call) -> Result:
    return c.b.map("mul", swish(c, c.t(0), c.attr("alpha", 1.0)), c.t(1))


@register("BiasSplitGelu", domain=MICROSOFT)
def _bias_split_gelu(c: Call) -> Result:
    """(x + bias) split in two halves along the last dim: left * gelu(right)."""
    total = c.b.map("add", c.t(0), c.t(1))
    return c.b.emit("mul", total, c.b.emit("gelu", total, out=c.out()), out=c.out())


@register("BiasAdd", domain=MICROSOFT)
def _bias_add(c: Call) -> Result:
    return c.b.map("add", c.b.map("add", c.t(0), c.t(1)), c.t(2))


@register("Softsign")
def _softsign(c: Call) -> Result:
    x = c.t(0)
    return c.b.map("div", x, c.b.map("add", c.b.map("abs", x), 1))


@register("Shrink")
def _shrink(c: Call) -> Result:
    return c.emit("softshrink" if c.attr("bias", 0.0) else "hardshrink", c.t(0), c.attr("lambd", 0.5))


@register("IsInf")
def _isinf(c: Call) -> Result:
    positive, negative = c.attr("detect_positive", 1), c.attr("detect_negative", 1)
    if positive and negative:
        return c.emit("isinf", c.t(0))
    return c.emit("isposinf" if positive else "isneginf", c.t(0))


@register("Trilu")
def _trilu(c: Call) -> Result:
    return c.emit("triu" if c.attr("upper", 1) else "tril", c.t(0))


@register("Cast", "CastLike")
def _cast(c: Call) -> Result:
    return c.emit("_to_copy", c.t(0))


@register("BitCast")
def _bitcast(c: Call) -> Result:
    return c.emit("view.dtype", c.t(0), c.out().dtype)


@register("Identity")
def _identity(c: Call) -> Result:
    return c.t(0)


@register("Dropout")
def _dropout(c: Call) -> Result:
    """Inference passes the value on; training draws a mask."""
    training = c.const(2)
    trains = bool(training.reshape(-1)[0]) if training is not None else False
    if training is None and c.has(2):
        raise NotKnown("whether it trains is an input of the model")
    x = c.t(0)
    if not trains:
        return [x, c.emit("full", [], True, out=c.out(1))] if c.wants(1) else x
    rate = c.const(1)
    ratio = float(rate.reshape(-1)[0]) if rate is not None else 0.5
    mask = torch.empty(c.out().shape, dtype=torch.bool, device="meta")
    both = c.emit("native_dropout", x, ratio, True, out=(c.out(), mask))
    return [*c.b.parts(both)][: 2 if c.wants(1) else 1]
