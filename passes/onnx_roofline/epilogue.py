"""A bias added to a matrix product is the product's epilogue, as in Gemm, in addmm and in every runtime's fused kernel.

Exporters write a linear layer as MatMul and Add; here the pair becomes one kernel, and the addition is not counted
(the project's convention for products). Not here: any other rewriting.
"""

from __future__ import annotations

from torch import fx

from optpass.passes.onnx_roofline.builder import aten, meta_of
from optpass.passes.onnx_roofline.walk import Op

_PRODUCTS = frozenset({"onnx.MatMul"})


def absorb_biases(ops: list[Op]) -> int:
    """Make every bias Add that alone uses a product part of it. Returns how many there were."""
    products = {op.calls[0] for op in ops if op.target in _PRODUCTS and len(op.calls) == 1 and not op.reason}
    found = 0
    for op in ops:
        if op.target != "onnx.Add" or op.reason or len(op.calls) != 1:
            continue
        add = op.calls[0]
        product, bias = _operands(add, products)
        if product is None or bias is None:
            continue
        product.prepend(bias)  # it may be first read here, after the product
        product.args = (*product.args, bias)
        add.target, add.args = aten("alias"), (product,)
        found += 1
    return found


def _operands(add: fx.Node, products: set[fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
    """(product, bias) of an addition of a vector of weights to a product nothing else uses; else Nones."""
    if len(add.args) != 2:
        return None, None
    for product, bias in (add.args, add.args[::-1]):
        if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)):
            continue
        if product not in products or len(product.users) != 1 or bias.op != "placeholder":
            continue
        sizes, vector = meta_of(product).shape, meta_of(bias).shape
        if len(vector) == 1 and sizes[-1:] == vector and meta_of(add).shape == sizes:
            return product, bias
    return None, None
