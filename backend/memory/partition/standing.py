"""Graphs that run as they stand in their first step, whatever the inner compiler, since the next one is planned anew.

What each of several graphs of a step may use is known once the step was seen. Until then each holds least, and what
Inductor would generate for that is thrown away in the next step. So their operations run one by one meanwhile, as
aot_eager runs them, and draw what generated code would; what that needs is counted exactly.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from optpass.backend.compat.memory_drawn import is_drawn_alike

#: How the report says so.
STANDS = "runs its operations one by one in the first step; compiled once that has shown what runs beside it"
#: How a note begins where that ended in an error.
CANNOT_STAND = "compiled for the first step already, as its operations cannot be run one by one"
#: How the names of operators begin that stand for what Inductor generates, and do something else by themselves.
_OF_INDUCTOR = "inductor_"


class CannotStandError(Exception):
    """A graph does not fit as it stands, or not beside those that follow."""


def can_stand(graph: fx.Graph) -> bool:
    """Whether each operation of a joint graph is one that runs by itself, and gives the same when it is run again."""
    return all(node.op in ("placeholder", "output") or _is_plain(node) for node in graph.nodes)


def _is_plain(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if is_drawn_alike(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem or getattr(node.target, "__module__", "") == "_operator"
    name = node.target._schema.name.split("::")[-1]
    return not name.startswith(_OF_INDUCTOR) and torch.Tag.nondeterministic_seeded not in node.target.tags
