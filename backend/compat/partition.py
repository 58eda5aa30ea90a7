"""AOTAutograd's partitioner in parts: preparing a joint graph, telling its outputs apart, extracting its two halves."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optpass.errors import BudgetInfeasibleError
from optpass.passes.memory.purity import draws, is_collective
from optpass.passes.memory.tangents import behind_tangents

#: Where torch puts a node whatever the partitioner decides.
_PLACED = frozenset({"is_backward", "must_be_in_backward"})


def prepare(joint: fx.GraphModule) -> None:
    """Bring a joint graph into the form that the default partitioner decides on: no dead code, no common
    subexpressions, what must be saved marked so. In place."""
    from torch._functorch import config, partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    if getattr(config, "cse", True):
        joint.graph = fx_graph_cse(joint.graph)  # writes its code anew, too
    else:
        joint.recompile()
    for name in ("force_save_collectives", "force_save_effectful_ops", "force_save_bw_mutation_src"):
        mark = getattr(partitioners, name, None)
        if mark is not None:
            mark(joint)


def module_of(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of `graph`, whose code is written when it is first run: most are only read."""
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule

        return _LazyGraphModule(root, graph)
    except ImportError:  # a torch that writes all code at once
        return fx.GraphModule(root, graph)


def save(node: fx.Node) -> None:
    """Mark the node's value as one that must not be computed again."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def must_save(node: fx.Node) -> bool:
    """Whether something has marked the node's value as one that must not be computed again."""
    from torch.utils.checkpoint import CheckpointPolicy

    return node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def must_recompute(node: fx.Node) -> bool:
    """Whether the user's own checkpointing asks for the node to be computed again."""
    from torch.utils.checkpoint import CheckpointPolicy

    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _run_once(joint: fx.GraphModule) -> None:
    """Mark what the forward draws from a random generator, what it sends to other processes and waits for, and what it
    does of which nobody reads a result (asserts, as `one_hot` makes), as no part of the backward. In place.

    To wait is no dead code though nobody reads the result, nor, with Inductor's `fallback_random`, is to draw. The
    extracted backward would do again whatever of it can be done: the generator ends in another state, processes
    exchange what nobody needs, and what is drawn from, sent or asserted is computed for that, from inputs that may hold
    something else by then.
    """
    late = behind_tangents(joint.graph.nodes)
    for node in joint.graph.nodes:
        placed = node in late or node.meta.get("partitioner_tag") in _PLACED
        effect = node.op == "call_function" and not node.users and node.is_impure()
        if not placed and (effect or draws(node) or is_collective(node)):
            node.meta["partitioner_tag"] = "must_be_in_forward"


def outputs(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[list[Any], list[Any]]:
    """What the forward and what the backward returns: nodes, and None or constants in their places."""
    from torch._functorch.partitioners import _extract_fwd_bwd_outputs

    found = _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_fwd_outputs)
    return list(found[0]), list(found[1])


def extract(
    joint: fx.GraphModule,
    saved_values: Sequence[fx.Node],
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph that pass on `saved_values`, and the sizes that the backward needs."""
    from torch._functorch import partitioners
    from torch.fx.experimental.proxy_tensor import is_sym_node

    _run_once(joint)
    info = partitioners.classify_nodes(joint, list(static_lifetime_input_indices), num_fwd_outputs)
    is_opaque = getattr(partitioners, "is_opaque_node", lambda node: False)
    only_asserted = getattr(partitioners, "_is_assert_only_symbool", lambda node: False)
    needed = set(info.required_fw_nodes) | set(info.inputs)
    late = behind_tangents(joint.graph.nodes)
    # A size that only the backward reads is taken of a tensor that may not be there any more: it is passed on as well.
    symbols = [n for n in joint.graph.nodes if n not in late and is_sym_node(n) and not only_asserted(n)]
    opaque = [n for n in joint.graph.nodes if n in needed and is_opaque(n)]
    arguments: dict[str, Any] = {
        "saved_sym_nodes": symbols,
        "saved_opaque_nodes": opaque,
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_nodes": info.static_lifetime_input_nodes,
    }
    accepted = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    known = {key: value for key, value in arguments.items() if key in accepted}
    return partitioners._extract_fwd_bwd_modules(joint, list(saved_values), **known)


def finish(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The default partitioner's last steps that do not choose an order: states of random generators are threaded."""
    from torch._functorch import partitioners

    thread = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is not None:
        forward = thread(forward, is_backward=False)
        backward = thread(backward, is_backward=True)
    return forward, backward


def tangents_are_boxed() -> bool:
    """Whether a compiled backward can release the gradients that it is given (torch 2.13 and later)."""
    return hasattr(torch.autograd.Function, "boxed_grads_call")


def ungraded_inputs(joint: fx.Graph, num_fwd_outputs: int) -> tuple[int, ...]:
    """Positions of the inputs of a joint graph that its backward makes no gradient of."""
    inputs = [n for n in joint.find_nodes(op="placeholder") if str(n.target).startswith("primals_")]
    output = next(n for n in reversed(joint.nodes) if n.op == "output")
    gradients = list(output.args[0])[num_fwd_outputs:]
    if len(gradients) != len(inputs):
        return ()
    without = (n for n, gradient in zip(inputs, gradients, strict=True) if gradient is None)
    return tuple(int(str(n.target).removeprefix("primals_")) - 1 for n in without)


def mutated_inputs(forward: fx.GraphModule) -> int:
    """How many outputs of a forward graph, at the front, are new values of inputs."""
    output = next(n for n in reversed(forward.graph.nodes) if n.op == "output")
    descriptions = output.meta.get("desc") or ()
    return sum(type(d).__name__ == "InputMutationAOTOutput" for d in descriptions)


def passed_through(error: BudgetInfeasibleError) -> BudgetInfeasibleError:
    """`error` as Dynamo lets it reach the user: what a backend raises is wrapped otherwise, and loses its class.

    The result is both: the error itself, and the failure of a backend that Dynamo would have made of it.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    class Infeasible(BudgetInfeasibleError, BackendCompilerFailed):
        backend_name = "optpass"

        def __init__(self) -> None:
            Exception.__init__(self, str(error))
            self.floor_bytes, self.budget_bytes, self.helps = error.floor_bytes, error.budget_bytes, error.helps
            self.inner_exception = error
            self.first_useful_frame = None

    Infeasible.__name__ = Infeasible.__qualname__ = "BudgetInfeasibleError"
    Infeasible.__module__ = BudgetInfeasibleError.__module__
    return Infeasible()
