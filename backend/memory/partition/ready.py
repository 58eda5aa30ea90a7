"""A joint graph brought into the form that plans are made for, in a compile and ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from optpass.backend import snapshot
from optpass.backend.compat import partition as parts
from optpass.backend.memory.partition.accumulate import accumulate_in_place
from optpass.passes.memory import redraw
from optpass.passes.memory.early import compute_early
from optpass.passes.memory.problem import reads_of_changed_inputs
from optpass.passes.memory.tangents import is_tangent

Modules = tuple[fx.GraphModule, fx.GraphModule]


def made_ready(
    joint: fx.GraphModule, joint_inputs: Any, split: Callable[..., Modules], given: dict[str, Any], *, fused: bool,
    redraws: bool = True,
) -> Modules:  # fmt: skip
    """The halves of a joint graph as the default partitioner has them; `joint` itself is brought into the form that the
    search sees, in place.

    Of what the default partitioner saves, autograd's formulas compute some behind the forward. It is computed where
    what it is made of is last used, in the default forward, too.

    Args:
        joint, joint_inputs, given: as AOTAutograd hands them to a partitioner.
        split: the default partitioner.
        fused: the executor fuses, as Inductor does.
        redraws: what is drawn from a CPU's generator is there to be drawn again; not where tensors of a CPU stand for
            those of another device.
    """
    copied = parts.module_of(joint, snapshot.copy_graph(joint.graph, keep=True))
    copied.meta.update(joint.meta)
    for node in reads_of_changed_inputs(copied.graph):
        parts.save(node)  # torch's partitioner computes them again from the input as it is after the change
    default = split(copied, joint_inputs, **given)
    parts.prepare(joint)
    if fused:
        accumulate_in_place(joint)
    elif redraws:
        redraw.split(joint.graph)
    saved, forward, n_outputs = saved_by(default), default[0], given["num_fwd_outputs"]
    returned = next(n for n in reversed(forward.graph.nodes) if n.op == "output").args[0]
    assert isinstance(returned, (tuple, list))  # as every graph of AOTAutograd returns
    for module, outputs in ((joint, parts.outputs(joint, n_outputs)[0]), (forward, returned[:n_outputs])):
        if compute_early(module.graph, [n for n in outputs if isinstance(n, fx.Node)], saved):
            module.recompile()
    return default


def saved_by(halves: Modules) -> list[str]:
    """Names of what the forward of two halves keeps for the backward."""
    return [n.name for n in halves[1].graph.find_nodes(op="placeholder") if not is_tangent(n)]
