"""Which nodes of a graph can have to do with an attention: the others need not be run to know what the graph computes.

Two nodes belong together where one is given what the other returns, or both belong to a third. Inputs, constants and
functions after which a value is another quantity (a linear layer, a norm) hold nothing together. What does not belong
to any softmax has no part in scores, masks, weights or their product with v, nor does it read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from optpass.passes.attention.program import nodes
from optpass.passes.effects import written

#: Nodes that set a state under which tensors are not what they seem (`torch.vmap`, `torch.func.grad`).
_TRANSFORMS = nodes.STATE - {"_enter_autocast", "_exit_autocast", "_set_grad_enabled"}
#: A graph without any of these, in itself or in a graph that it runs, has no softmax.
_SIGNS = ("softmax", "softmin", "exp", "logsumexp", "multi_head_attention_forward")
_NO_SIGNS = frozenset({"expand", "expand_as"})
#: How many nodes away from a linear layer a softmax is looked for.
_NEAR = 8


def has_softmax(graphs: Iterable[fx.Graph]) -> bool:
    """Whether any node of any of `graphs` may make a softmax, in any spelling."""
    return any(_may_be_softmax(node) for graph in graphs for node in graph.nodes)


def beside(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes of `graph` that return tensors and have nothing to do with a softmax.

    There are none where a node writes to a tensor, runs a graph or a module, or stands under a transform: who is given
    what does not tell then what belongs together.
    """
    if any(nodes.function_name(n) in _TRANSFORMS or written(n)[0] for n in graph.nodes):
        return frozenset()
    joining = [n for n in graph.nodes if n.op.startswith("call_") and _returns_tensors(n) and not _ends(n)]
    apart = set(joining)
    todo = [n for n in joining if _may_be_softmax(n)]
    apart.difference_update(todo)
    while todo:
        node = todo.pop()
        near = [n for n in (*node.all_input_nodes, *node.users) if n in apart]
        apart.difference_update(near)
        todo += near
    return frozenset(apart)


def is_product(node: fx.Node) -> bool:
    """Whether a linear layer is one of an attention's products: of a weight that is computed (`F.linear(q, k)` is
    q kᵀ), or with a softmax on either side and no other product in between (keys or values that are learnt)."""
    if nodes.function_name(node) != "linear":
        return False
    made = any(given.op not in ("placeholder", "get_attr") for given in node.all_input_nodes[1:])
    return made or _near(node, lambda n: n.users) or _near(node, lambda n: n.all_input_nodes[:1])


def _near(node: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]) -> bool:
    """Whether a softmax is near, and nothing after which a value is another quantity in between."""
    level, seen = [node], {node}
    for _ in range(_NEAR):
        level = [n for n in dict.fromkeys(n for item in level for n in following(item)) if n not in seen]
        seen.update(level)
        if any(_may_be_softmax(n) for n in level):
            return True
        level = [n for n in level if n.op.startswith("call_") and not nodes.multiplies(n) and not _closed(n)]
    return False


def _closed(node: fx.Node) -> bool:
    return nodes.function_name(node) in nodes.CLOSED


def _ends(node: fx.Node) -> bool:
    """Whether a node returns another quantity than it is given, whatever that is."""
    return nodes.function_name(node) in nodes.CLOSED - nodes.ACTIVATIONS and not is_product(node)


def _may_be_softmax(node: fx.Node) -> bool:
    name = nodes.method_name(node)
    return name not in _NO_SIGNS and any(sign in name for sign in _SIGNS)


def _returns_tensors(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta.get("example_value")))
