"""What running each node of a joint graph takes on a device: seconds, FLOPs and workspace, by the roofline.

A node that fuses into a larger kernel is priced by its share of that kernel, so that what is cheap to compute again
(pointwise work, norms) is known to be cheap. Nothing here decides anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optpass.passes.contract import AtenGraph
from optpass.passes.devices import DeviceSpec
from optpass.passes.memory.problem import Price
from optpass.passes.memory.uncollected import uncollected
from optpass.passes.memory.workspace.workspace import Library, workspace_bytes
from optpass.passes.roofline.analysis import program_of
from optpass.passes.roofline.lowering import Fusing, fusing_of
from optpass.passes.roofline.price import Priced, price
from optpass.passes.roofline.sums import Sums
from optpass.reporting.model import Op


def _is_complex(node: fx.Node) -> bool:
    """Whether complex numbers are made or read: Inductor generates no code for these, and calls the operator."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in leaves)


@uncollected()
def node_prices(
    graph: fx.Graph,
    device: DeviceSpec,
    *,
    fused: bool = True,
    hint: Callable[[Any], int] | None = None,
    library: Library | None = None,
    library_flops: float = math.inf,
) -> Callable[[fx.Node], Price]:
    """The price of each node of `graph`, a joint graph with `meta["val"]`.

    Args:
        graph: forward and backward together.
        device: what to price for.
        fused: the inner compiler fuses, as Inductor does; else every op is a kernel of its own.
        hint: int for a symbolic size; default the symbol's own hint.
        library: as for `workspace.op_workspace`.
        library_flops: most FLOPs of an operator that it is asked of, which may run it.
    """
    program = program_of([AtenGraph("forward", graph)], on_cpu=device.kind == "cpu", hint=hint)
    priced = price(program, device)
    shares = _shares(priced) if fused else {}
    by_name = {op.name: op for op in priced.ops}
    kinds = {info.name: info.cost.kind for info in program.ops if info.cost is not None}
    sums = Sums(graph, {name for name, kind in kinds.items() if kind == "pointwise"}, on_cpu=device.kind == "cpu")

    def of(node: fx.Node) -> Price:
        op = by_name.get(node.name)
        if op is None:
            return Price(workspace=workspace_bytes(node, library))  # a higher-order operator may hold much
        seconds = shares.get(op.name, op.time_us) * 1e-6
        if not fused or _is_complex(node):
            fusing = Fusing()
        elif sums.takes_a_product(node):
            fusing = Fusing(overwrites=True)  # two tensors of its size, as the one kernel needs
        else:
            fusing = fusing_of(node.target, kinds.get(node.name, "other"))
        workspace = 0 if fusing.reads else workspace_bytes(node, library if op.flops <= library_flops else None)
        return Price(seconds, op.flops, workspace, fusing)

    return of


def _shares(priced: Priced) -> dict[str, float]:
    """Microseconds of each op as its part of the kernel that it fuses into, by the ops' times alone."""
    alone: dict[int, float] = {}
    members: dict[int, list[Op]] = {}
    for op in priced.ops:
        if op.group is not None:
            alone[op.group] = alone.get(op.group, 0.0) + op.time_us
            members.setdefault(op.group, []).append(op)
    found = {}
    for group in priced.groups:
        total = alone.get(group.index, 0.0)
        for op in members.get(group.index, ()):
            found[op.name] = group.time_us * op.time_us / total if total > 0 else 0.0
    return found
