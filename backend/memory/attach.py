"""Giving one compile its memory budget: the partitioner, its part of the cache identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx, nn

from optpass.backend import compat
from optpass.backend.compat.memory_callers import tensors_around_compile
from optpass.backend.memory.budget import Budget
from optpass.backend.memory.partition.partitioner import BudgetPartitioner
from optpass.backend.memory.seen.expected import NOTHING_KNOWN, Expected
from optpass.backend.memory.seen.share import Share
from optpass.backend.memory.step import StepTensors, budget_of
from optpass.backend.memory.together.together import STEPS, relief
from optpass.options import Options
from optpass.passes.devices import DeviceSpec

#: Their lengths are no sizes of the graph's: larger ones would not be noticed.
NESTED = "the option 'memory_budget' has no effect on a graph of nested tensors, which does not say how long they are"

#: What it saves is between two parts of one graph, which AOTAutograd splits nowhere.
OWN_GRADIENTS = (
    "the option 'memory_budget' has no effect on gradients that a graph takes itself (torch.func.grad, vjp, jacrev): "
    "take them outside of what is compiled, by backward() or torch.autograd.grad"
)


def is_planned(gm: fx.GraphModule, options: Options) -> bool:
    """Whether a graph can have the budget that is asked for; whether one is."""
    values = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    return options.budget is not None and not any(getattr(value, "is_nested", False) for value in values)


def around_call() -> tuple[list[torch.Tensor], list[torch.Tensor], list[nn.Module]]:
    """Around a call that Dynamo compiles: what it was given, what its callers hold, the modules that are called."""
    return compat.tensors_of_call(), tensors_around_compile(), compat.modules_of_call()


def partitioner_of(
    gm: fx.GraphModule,
    tensors: StepTensors,
    options: Options,
    device: Callable[[], DeviceSpec],
    inner: str | Callable[..., Any],
    *,
    gradients: bool,
    share: Share | None = None,
    expected: Expected = NOTHING_KNOWN,
    new: bool = False,
) -> tuple[BudgetPartitioner | None, str]:
    """The partitioner for a graph's budget, and what to warn of.

    Args:
        gm: Dynamo graph.
        tensors: what it is compiled with.
        inner: who compiles it: 'inductor' and 'aot_eager' let us partition.
        gradients, share, expected: as for `budget_of`.
        new: nothing of its steps is known.

    Raises:
        ConfigError: the budget or the optimizer cannot be used as given.
    """
    if not is_planned(gm, options):
        return None, NESTED if options.budget is not None else ""
    reason = getattr(gm, "compile_subgraph_reason", None)
    more = reason is not None and bool(getattr(reason, "graph_break", True))
    budget = budget_of(options, device, tensors, more_follow=more, gradients=gradients, share=share, expected=expected)
    if budget is None:
        return None, ""
    if inner not in ("inductor", "aot_eager"):
        name = inner if isinstance(inner, str) else "a callable"
        return None, f"the option 'memory_budget' has no effect with inner={name!r}: it decides what to save itself"
    if options.inductor.get("custom_partitioner_fn") is not None:
        return None, "the option 'memory_budget' has no effect beside a custom_partitioner_fn of yours"
    problem = compat.budget_problem(inductor=inner == "inductor")
    if problem is not None:
        return None, f"the option 'memory_budget' has no effect with this version of torch: {problem}"
    partitioner = BudgetPartitioner(budget, device, "inductor" if inner == "inductor" else "graph")
    partitioner.relief, partitioner.offloads = relief, options.offload == "auto"
    partitioner.follows = more
    waiting = [leaf.partitioner.as_it_stands for leaf in STEPS.waiting()]
    several = (budget.followed or bool(waiting)) and all(waiting)
    partitioner.may_stand = new and several and inner == "inductor" and not compat.keeps_compiled_whole()
    partitioner.others_stand = bool(waiting)
    if share is None and not getattr(reason, "all_train", False):

        def if_nothing_else_trains(ungraded: Collection[int]) -> Budget:
            fewer = any(i in ungraded and p.requires_grad for i, p in tensors.parameters)
            if not (fewer or (more and tensors.idle)):
                return partitioner.budget
            with compat.real_tensors():
                found = budget_of(
                    options, device, tensors, more_follow=more, gradients=gradients, expected=expected,
                    ungraded=ungraded, alone=True,
                )  # fmt: skip
            return found or partitioner.budget

        partitioner.if_nothing_else_trains = if_nothing_else_trains
    return partitioner, OWN_GRADIENTS if _takes_gradients(gm) else ""


def _takes_gradients(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph differentiates a part of itself, as transforms of `torch.func` do."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(getattr(n.target, "__name__", "") == "_autograd_grad" for graph in graphs for n in graph.nodes)


def identity_of(uuid: str, partitioner: BudgetPartitioner | None) -> str:
    """The cache identity `uuid`, with what a plan depends on beside the options: what the step holds otherwise."""
    if partitioner is None:
        return uuid
    return hashlib.sha256(f"{uuid} {partitioner.budget!r}".encode()).hexdigest()
