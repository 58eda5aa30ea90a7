"""Sums that TorchInductor makes one library kernel of together with a product of matrices, as of shared weights'
gradients: `add(x, mm(a, b))` becomes `addmm(x, a, b)` (`torch._inductor.fx_passes.post_grad.addmm`)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

aten = torch.ops.aten


class Sums:
    """The sums of one graph.

    Args:
        graph: of ATen operators, with `meta["val"]`.
        pointwise: names of its pointwise nodes.
        on_cpu: a GPU keeps a sum apart from the product where all that reads it is pointwise.
    """

    def __init__(self, graph: fx.Graph, pointwise: Collection[str], *, on_cpu: bool) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._pointwise, self._on_cpu = pointwise, on_cpu

    def takes_a_product(self, node: fx.Node) -> bool:
        """Whether `node` is such a sum. Not where its other term is computed after the product, which would wait."""
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            return False
        if not self._on_cpu and all(user.name in self._pointwise for user in node.users):
            return False
        return any(self._takes(node, product, other) for product, other in (node.args, node.args[::-1]))

    def _takes(self, node: fx.Node, product: object, other: object) -> bool:
        if not isinstance(product, fx.Node) or not isinstance(other, fx.Node):
            return False
        if product.target is not aten.mm.default or set(product.users) != {node}:
            return False
        made, added = product.meta.get("val"), other.meta.get("val")
        if not isinstance(made, torch.Tensor) or not isinstance(added, torch.Tensor) or made.dtype != added.dtype:
            return False
        # Sizes as text, since to compare symbols is to guard on them.
        alike = str(added.shape) in (str(made.shape), str(made.shape[1:]))
        return alike and self._place[other] < self._place[product]
