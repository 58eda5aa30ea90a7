"""Cost of an ONNX op from the ATen calls that it expands to. No formula lives here: `op_cost` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from optpass.passes.roofline.flops import OpCost, op_cost

#: What an op without arithmetic is called, the first that applies.
_IDLE = ("indexing", "copy", "other", "view")


def cost_of(node: fx.Node) -> OpCost | None:
    """Cost of one call, from the meta tensors of its arguments; a collapsed kernel carries its own."""
    if "cost" in node.meta:
        found: OpCost | None = node.meta["cost"]
        return found

    def load(n: fx.Node) -> Any:
        return n.meta["val"]

    args = fx.node.map_arg(node.args, load)
    return op_cost(node.target, args, dict(fx.node.map_arg(node.kwargs, load)), node.meta["val"])


def combine(costs: Sequence[OpCost | None]) -> OpCost | None:
    """The sum; kind and sizes are those of the costliest part. None if any part is unknown."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs) or not known:
        return None
    main = max(known, key=lambda cost: cost.flops)
    if not main.flops:
        main = min(known, key=lambda cost: _IDLE.index(cost.kind) if cost.kind in _IDLE else -1)
    return OpCost(
        sum(cost.flops for cost in known), main.kind, main.mnk, main.batch, sum(cost.transcendental for cost in known)
    )
