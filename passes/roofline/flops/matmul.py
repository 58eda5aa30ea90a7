"""Matrix products: 2*M*N*K each, with the bias, alpha and beta of the epilogue not counted (as BLAS and
cuBLAS report).

Here: every op that is one dense product or a batch of them, quantised and grouped forms included.
Not here: einsum (einsum.py), convolutions, attention, factorisations.
"""

from __future__ import annotations

from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, mac_factor, numel, shape


def product(m: int, n: int, k: int, batch: int = 1, factor: int = 1) -> OpCost:
    """`batch` products of an M x K by a K x N matrix."""
    return OpCost(2 * m * n * k * batch * factor, "matmul", (m, n, k), batch)


def _packed_k(a: Any) -> int:
    """K of the left operand; a float4_e2m1fn_x2 element holds two numbers."""
    k: int = shape(a)[-1]
    return 2 * k if str(a.dtype) == "torch.float4_e2m1fn_x2" else k


def matmul_shapes(a: Any, b: Any) -> OpCost:
    """`torch.matmul` of two operands of rank >= 1, batch dims broadcast."""
    sa, sb = shape(a), shape(b)
    m = sa[-2] if len(sa) > 1 else 1
    n = sb[-1] if len(sb) > 1 else 1
    if len(sb) <= 2:  # the batch of the left operand folds into M
        return product(prod(sa[:-1]), n, sa[-1], factor=mac_factor((a, b)))
    lead_a, lead_b = sa[:-2], sb[:-2]
    rank = max(len(lead_a), len(lead_b))
    pad_a, pad_b = (1,) * (rank - len(lead_a)) + lead_a, (1,) * (rank - len(lead_b)) + lead_b
    batch = prod(max(x, y) if 0 not in (x, y) else 0 for x, y in zip(pad_a, pad_b, strict=True))
    return product(m, n, sa[-1], batch, mac_factor((a, b)))


@register("mm", "_int_mm", "bmm", "matmul", "linalg_matmul", "mv", "_scaled_mm", "_scaled_mm_v2")
def _two_operands(c: Call) -> OpCost:
    a, b = c.at(0), c.at(1)
    cost = matmul_shapes(a, b)
    packed = _packed_k(a) // max(shape(a)[-1], 1)
    if packed == 1 or cost.mnk is None:
        return cost
    m, n, k = cost.mnk
    return product(m, n, k * packed, cost.batch)


@register("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation")
def _bias_first(c: Call) -> OpCost:
    # addbmm sums the batch into one matrix: still one multiply-add per (b, m, n, k).
    return matmul_shapes(c.at(1), c.at(2))


@register("dot", "vdot", "linalg_vecdot")
def _dot(c: Call) -> OpCost:
    a, outputs = c.at(0), max(numel(c.out), 1)
    return product(1, 1, first_numel(a) // outputs, outputs, mac_factor(a))


@register("inner")
def _inner(c: Call) -> OpCost:
    a, b = shape(c.at(0)), shape(c.at(1))
    return product(prod(a[:-1]), prod(b[:-1]), a[-1] if a else 1, factor=mac_factor(c.args))


@register("ger", "outer", "kron")
def _outer(c: Call) -> OpCost:
    # An outer product multiplies and adds nothing: one operation per output (6 real ones if complex).
    return OpCost(numel(c.out) * (6 if mac_factor(c.args) == 4 else 1), "pointwise")


@register("addr")
def _rank_one_update(c: Call) -> OpCost:
    return product(first_numel(c.at(1)), first_numel(c.at(2)), 1, factor=mac_factor(c.args))


def linear_cost(x: Any, out: object) -> OpCost:
    """y = x W^T: sizes from input and output, because prepacked weights have no shape to trust."""
    k = shape(x)[-1]
    rows = prod(shape(x)[:-1])
    return product(rows, first_numel(out) // max(rows, 1), k, factor=mac_factor(x))


@register(
    "linear",
    "mkldnn_linear",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros",
    "_dyn_quant_matmul_4bit",
    "_mixed_dtypes_linear",
    "_wrapped_quantized_linear_prepacked",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation",
    "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation",
    "onednn::linear_dynamic_fp16",
    "onednn::linear_relu_dynamic_fp16",
    "onednn::qlinear_pointwise",
    "mkldnn::_linear_pointwise",
    "mkl::_mkl_linear",
)
def _linear(c: Call) -> OpCost:
    return linear_cost(c.at(0), c.out)


@register("linear_backward", "mkldnn_linear_backward")
def _linear_backward(c: Call) -> OpCost:
    # (self, grad_output, weight, mask): dX = dY W and dW = dY^T X cost as much as the forward; db sums dY.
    x, grad, mask = c.at(0), c.at(1), c.arg("output_mask")
    rows, n, k = prod(shape(grad)[:-1]), shape(grad)[-1], shape(x)[-1]
    one = 2 * rows * n * k * mac_factor((x, grad))
    flops = one * (bool(mask[0]) + bool(mask[1])) + (numel(grad) if mask[2] else 0)
    return OpCost(flops, "matmul", (rows, k, n) if mask[0] else (n, k, rows))


@register("mkldnn_linear_backward_input")
def _linear_backward_input(c: Call) -> OpCost:
    grad, weight = c.at(1), c.at(2)
    n, k = shape(weight)
    return product(numel(grad) // max(n, 1), k, n)


@register("mkldnn_linear_backward_weights")
def _linear_backward_weights(c: Call) -> OpCost:
    grad, x, bias = c.at(0), c.at(1), c.arg("bias_defined")
    n, k, rows = shape(grad)[-1], shape(x)[-1], prod(shape(x)[:-1])
    return OpCost(2 * n * k * rows + (numel(grad) if bias else 0), "matmul", (n, k, rows))


@register("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
def _grouped(c: Call) -> OpCost:
    """Groups share rows (2-d by 3-d), columns (3-d by 2-d) or K (2-d by 2-d); offsets split them, so totals
    suffice.
    """
    a, b = shape(c.at(0)), shape(c.at(1))
    if len(a) == 3 and len(b) == 3:
        return matmul_shapes(c.at(0), c.at(1))
    groups = a[0] if len(a) == 3 else b[0] if len(b) == 3 else numel(c.arg("offs")) or 1
    m, n, k = a[-2], b[-1], a[-1]
    flops = 2 * m * n * k
    even = {(2, 3): (m // groups, n, k), (3, 2): (m, n // groups, k), (2, 2): (m, n, k // groups)}
    return OpCost(flops, "matmul", even[len(a), len(b)], groups)


@register("_foreach_mm")
def _foreach_mm(c: Call) -> OpCost:
    costs = [matmul_shapes(a, b) for a, b in zip(c.at(0), c.at(1), strict=True)]
    return OpCost(sum(x.flops for x in costs), "matmul", costs[0].mnk if costs else None, len(costs))


@register("inductor::_mm_plus_mm")
def _mm_plus_mm(c: Call) -> OpCost:
    a, b = matmul_shapes(c.at(0), c.at(1)), matmul_shapes(c.at(2), c.at(3))
    return OpCost(a.flops + b.flops + numel(c.out), "matmul", a.mnk, 2)


@register("chain_matmul", "linalg_multi_dot")
def _chain(c: Call) -> OpCost:
    """The cheapest bracketing, which both ops look for (matrix-chain dynamic programme)."""
    shapes = [shape(t) for t in c.at(0)]
    first, last = shapes[0], shapes[-1]
    sizes = [1 if len(first) == 1 else first[0]]
    sizes += [s[0] if len(s) == 1 else s[-2] for s in shapes[1:]] + [1 if len(last) == 1 else last[-1]]
    count = len(shapes)
    best = [[0] * count for _ in range(count)]
    for span in range(1, count):
        for i in range(count - span):
            j = i + span
            best[i][j] = min(
                best[i][s] + best[s + 1][j] + 2 * sizes[i] * sizes[s + 1] * sizes[j + 1] for s in range(i, j)
            )
    return OpCost(best[0][count - 1] * mac_factor(c.at(0)), "matmul")


@register("bilinear")
def _bilinear(c: Call) -> OpCost:
    # y_o = x1^T W_o x2: first x1 W (rows x in1 x out*in2), then the dot with x2.
    out_features, in1, in2 = shape(c.arg("weight"))
    rows = first_numel(c.at(0)) // max(in1, 1)
    return OpCost(2 * rows * out_features * in2 * (in1 + 1), "matmul", (rows, out_features * in2, in1))


@register("_trilinear")
def _trilinear(c: Call) -> OpCost:
    """Product of three operands expanded to one shape, summed over `sumdim`: 2 multiplies and an add each."""
    full: dict[int, int] = {}
    for operand, expanded in ((c.at(0), c.at(3)), (c.at(1), c.at(4)), (c.at(2), c.at(5))):
        sizes = list(shape(operand))
        for dim in sorted(expanded):
            sizes.insert(dim, 1)
        for dim, size in enumerate(sizes):
            full[dim] = max(full.get(dim, 1), size)
    return OpCost(3 * prod(full.values()), "matmul")
