"""Sizes of the results of ops that ONNX's shape inference does not know: onnxruntime's own, and a few standard ones.

Each function takes the node as `Sizes` and gives one `Spec` per output. Not here: asking ONNX (infer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from optpass.passes.onnx_roofline.rules.registry import MICROSOFT
from optpass.passes.onnx_roofline.value import FLOAT, INT64, Item, Size, Spec, Value


@dataclass(frozen=True)
class Sizes:
    """A node as far as sizes go."""

    op: str
    inputs: list[Item]
    attrs: dict[str, Any]
    outputs: int = 1

    def value(self, index: int) -> Value | None:
        """Input `index`, if it is a tensor."""
        item = self.inputs[index] if index < len(self.inputs) else None
        return item if isinstance(item, Value) else None

    def shape(self, index: int) -> Size | None:
        """Sizes of an input; None where they are not known or it is not given."""
        value = self.value(index)
        return value.shape if value is not None else None

    def elem(self, index: int = 0) -> int:
        """Element type of an input."""
        value = self.value(index)
        return value.elem if value is not None else FLOAT

    def const(self, index: int) -> int | None:
        """An input that is one known integer."""
        value = self.value(index)
        if value is None or value.const is None or value.const.size != 1:
            return None
        return int(value.const.reshape(-1)[0])

    def like(self, index: int = 0, elem: int | None = None) -> Spec:
        """The sizes of input `index`."""
        return Spec(self.elem(index) if elem is None else elem, self.shape(index))


Rule = Callable[[Sizes], list[Spec]]
_TABLE: dict[tuple[str, str], Rule] = {}
#: Ops of onnxruntime that infer as a standard one does: (op, element type of output 0 as an input's, or None).
STAND_IN: dict[tuple[str, str], str] = {
    (MICROSOFT, "FusedConv"): "Conv",
    (MICROSOFT, "FusedGemm"): "Gemm",
    (MICROSOFT, "LayerNormalization"): "LayerNormalization",
    (MICROSOFT, "QuantizeLinear"): "QuantizeLinear",
    (MICROSOFT, "QLinearAveragePool"): "AveragePool",
}


def register_sizes(*names: str, domain: str = MICROSOFT) -> Callable[[Rule], Rule]:
    """Decorator: the rule for the results of these ops."""

    def wrap(rule: Rule) -> Rule:
        for name in names:
            _TABLE[domain, name] = rule
        return rule

    return wrap


def custom(domain: str, op: str) -> Rule | None:
    """The rule for an op, if ONNX does not infer it."""
    return _TABLE.get((domain, op))


_KEEP = "Gelu FastGelu BiasGelu QuickGelu BiasAdd GroupNorm RotaryEmbedding QLinearSigmoid QLinearLeakyRelu Inverse"


@register_sizes(*_KEEP.split())
def _same(s: Sizes) -> list[Spec]:
    return [s.like()]


@register_sizes("BiasSplitGelu")
def _half(s: Sizes) -> list[Spec]:
    shape = s.shape(0)
    return [Spec(s.elem(), (*shape[:-1], shape[-1] // 2) if shape else None)]


def _norm(s: Sizes, results: int) -> list[Spec]:
    shape = s.shape(0)
    axis = s.attrs.get("axis", -1)
    if shape is None:
        return [Spec(s.elem(), None)] * results
    rows = tuple(1 if d >= axis % len(shape) else size for d, size in enumerate(shape))
    return [s.like(), *[Spec(FLOAT, rows)] * (results - 1)]


@register_sizes("SimplifiedLayerNormalization", domain="")
@register_sizes("SimplifiedLayerNormalization")
def _simplified(s: Sizes) -> list[Spec]:
    return _norm(s, 2)


@register_sizes("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip(s: Sizes) -> list[Spec]:
    return [*_norm(s, 3), s.like()]


@register_sizes("EmbedLayerNormalization")
def _embed(s: Sizes) -> list[Spec]:
    ids, table = s.shape(0), s.shape(2)
    whole = Spec(s.elem(2), (*ids, table[-1]) if ids is not None and table else None)
    return [whole, Spec(6, ids[:1] if ids else None), whole]


@register_sizes("MatMulNBits", "MatMulBnb4")
def _packed(s: Sizes) -> list[Spec]:
    shape, columns = s.shape(0), s.attrs.get("N")
    return [Spec(s.elem(), (*shape[:-1], int(columns)) if shape and columns else None)]


def _product(a: Size | None, b: Size | None) -> Size | None:
    if not a or not b:
        return None
    if len(a) == 1 or len(b) == 1:
        return (*a[:-1],) if len(b) == 1 else (*b[:-2], b[-1])
    lead = np.broadcast_shapes(a[:-2], b[:-2])
    return (*lead, a[-2], b[-1])


@register_sizes("FusedMatMul", "TransposeMatMul")
def _fused(s: Sizes) -> list[Spec]:
    sides = []
    for index, side in ((0, "A"), (1, "B")):
        shape = s.shape(index)
        if shape and s.attrs.get(f"transBatch{side}") and len(shape) > 2:
            shape = (*shape[1:-1], shape[0], shape[-1])
        if shape and s.attrs.get(f"trans{side}") and len(shape) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
        sides.append(shape)
    return [Spec(s.elem(), _product(*sides))]


@register_sizes("DynamicQuantizeMatMul", "MatMulIntegerToFloat")
def _float_product(s: Sizes) -> list[Spec]:
    return [Spec(FLOAT, _product(s.shape(0), s.shape(1)))]


@register_sizes("QGemm")
def _qgemm(s: Sizes) -> list[Spec]:
    a, b = s.shape(0), s.shape(3)
    if not a or not b:
        return [Spec(s.elem(), None)]
    return [Spec(s.elem(), (a[1 if s.attrs.get("transA") else 0], b[0 if s.attrs.get("transB") else 1]))]


@register_sizes("NhwcConv")
def _nhwc(s: Sizes) -> list[Spec]:
    x, w = s.shape(0), s.shape(1)
    if not x or not w:
        return [Spec(s.elem(), None)]
    rank = len(x) - 2
    strides, dilations = s.attrs.get("strides", [1] * rank), s.attrs.get("dilations", [1] * rank)
    pads = s.attrs.get("pads", [0] * 2 * rank)
    space = []
    for d in range(rank):
        reach = dilations[d] * (w[1 + d] - 1) + 1
        space.append((x[1 + d] + pads[d] + pads[d + rank] - reach) // strides[d] + 1)
    return [Spec(s.elem(), (x[0], *space, w[0]))]


@register_sizes("DequantizeLinear", "DequantizeBFP")
def _dequantize(s: Sizes) -> list[Spec]:
    return [s.like(0, s.elem(1))]


@register_sizes("QLinearAdd", "QLinearMul")
def _broadcast(s: Sizes) -> list[Spec]:
    a, b = s.shape(0), s.shape(3)
    return [Spec(s.elem(), np.broadcast_shapes(a, b) if a is not None and b is not None else None)]


@register_sizes("QLinearConcat")
def _concat(s: Sizes) -> list[Spec]:
    shapes = [s.shape(i) for i in range(2, len(s.inputs), 3)]
    known = [x for x in shapes if x is not None]
    if len(known) < len(shapes) or not known:
        return [Spec(s.elem(2), None)]
    axis = s.attrs.get("axis", 0) % len(known[0])
    return [Spec(s.elem(2), tuple(sum(x[d] for x in known) if d == axis else n for d, n in enumerate(known[0])))]


@register_sizes("QLinearGlobalAveragePool")
def _global_pool(s: Sizes) -> list[Spec]:
    x = s.shape(0)
    if not x:
        return [Spec(s.elem(), None)]
    last = bool(s.attrs.get("channels_last", 0))
    kept = {0, len(x) - 1 if last else 1}
    return [Spec(s.elem(), tuple(n if d in kept else 1 for d, n in enumerate(x)))]


@register_sizes("GatherBlockQuantized")
def _gather_blocks(s: Sizes) -> list[Spec]:
    table, index = s.shape(0), s.shape(1)
    axis = s.attrs.get("gather_axis", 0)
    shape = (*table[:axis], *index, *table[axis + 1 :]) if table and index is not None else None
    return [Spec(s.elem(2), shape)]


@register_sizes("Split", domain="")
def _split(s: Sizes) -> list[Spec]:
    """ONNX aborts the process where the node has another number of outputs than it says."""
    x, sizes = s.shape(0), s.value(1)
    if x is None:
        return [Spec(s.elem(), None)] * s.outputs
    axis = s.attrs.get("axis", 0)
    if not -len(x) <= axis < len(x):
        raise ValueError(f"axis {axis} of a value of rank {len(x)}")
    axis %= len(x)
    if s.attrs.get("num_outputs", s.outputs) != s.outputs:
        raise ValueError(f"it has {s.outputs} outputs, not {s.attrs['num_outputs']}")
    step = -(-x[axis] // s.outputs)
    parts: list[int | None] = [max(min(step, x[axis] - i * step), 0) for i in range(s.outputs)]
    if sizes is not None or "split" in s.attrs:
        const = sizes.const if sizes is not None else np.asarray(s.attrs["split"])
        parts = [int(n) for n in const.reshape(-1)] if const is not None else [None] * s.outputs
    if len(parts) != s.outputs or any(n is not None and n < 0 for n in parts):
        raise ValueError(f"it splits into {parts} but has {s.outputs} outputs")
    return [Spec(s.elem(), (*x[:axis], n, *x[axis + 1 :])) for n in parts]


@register_sizes("STFT", domain="")
def _stft(s: Sizes) -> list[Spec]:
    """ONNX takes the attribute's default for 0 where the op says 1 (onesided)."""
    x, step, window = s.shape(0), s.const(1), s.shape(2)
    length = s.const(3) or (window[0] if window else None)
    if not x or not step or not length:
        return [Spec(s.elem(), None)]
    bins = length // 2 + 1 if s.attrs.get("onesided", 1) else length
    return [Spec(s.elem(), (x[0], (x[1] - length) // step + 1, bins, 2))]


# ---- results whose size is data: the most they can be -----------------------------------------------------------


def at_most(s: Sizes) -> list[Spec] | None:
    """Specs of an op whose result's size is a value; None for any other op."""
    x = s.shape(0)
    if x is None:
        return None
    if s.op == "NonZero":
        return [Spec(INT64, (len(x), prod(x)))]
    if s.op == "Compress":
        axis, condition = s.attrs.get("axis"), s.shape(1) or (0,)
        if axis is None:
            return [Spec(s.elem(), (min(prod(x), condition[0]),))]
        return [Spec(s.elem(), tuple(min(n, condition[0]) if d == axis % len(x) else n for d, n in enumerate(x)))]
    if s.op == "Unique":
        axis = s.attrs.get("axis")
        rows = prod(x) if axis is None else x[axis]
        index = Spec(INT64, (rows,))
        return [Spec(s.elem(), (rows,) if axis is None else x), index, index, index]
    return None
