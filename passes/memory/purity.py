"""Which operations may run a second time: those that give the same bits for the same inputs and do nothing else."""

from __future__ import annotations

import torch
from torch import fx

#: Namespaces whose functional operators are known to be pure.
_PURE = frozenset({"aten", "prims"})
#: And of operators that run others: `run_with_rng_state` is of `redraw`, which knows what it runs.
_PURE_HIGHER = frozenset({"flex_attention", "run_with_rng_state"})
#: Namespaces of operators that processes run together.
_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
#: Inductor draws random numbers from a seed that it is given: pure, though the names say random.
_SEEDED = frozenset({"prims::inductor_random", "prims::inductor_randint", "prims::inductor_lookup_seed"})
_SEEDS = frozenset({"prims::inductor_seed", "prims::inductor_seeds"})


def why_not_recomputed(node: fx.Node) -> str:
    """Why running `node` again could change a result, in plain words; '' where it cannot."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "" if str(target) in _PURE_HIGHER else f"{target} may have effects"
    if not isinstance(target, torch._ops.OpOverload):
        value = node.meta.get("val")
        return "" if not isinstance(value, torch.Tensor) else f"nothing is known about {target}"
    name = target._schema.name
    if name in _SEEDED:
        return ""
    if name in _SEEDS or draws(node):
        return "draws random numbers"
    if target._schema.is_mutable:
        return "writes in place"
    if is_collective(node):
        return f"all processes take part in it ({name})"
    if target.namespace not in _PURE:
        return f"a custom operator ({name}) may have effects"
    if torch.Tag.data_dependent_output in target.tags:
        return "its result is a Python number"
    if torch.Tag.dynamic_output_shape in target.tags and not _sized_by_arguments(node, target):
        return "the size of its result depends on data"
    return ""


def _sized_by_arguments(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """Of an operator whose tag says that data decides: not in this call. A gather (`x[index]`) is as large as its
    indices unless one of them is a mask; numbers repeated by a tensor are where their sum is given."""
    if target == torch.ops.aten.index.Tensor:
        indices = [i.meta.get("val") for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
        return all(isinstance(i, torch.Tensor) and i.dtype in (torch.int64, torch.int32) for i in indices)
    if target == torch.ops.aten.repeat_interleave.Tensor:
        return node.kwargs.get("output_size") is not None
    return False


def draws(node: fx.Node) -> bool:
    """Whether running `node` changes the state of a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return target._schema.name not in _SEEDED and not _never_drops(node, target)


def is_collective(node: fx.Node) -> bool:
    """Whether `node` exchanges something with other processes, or waits for that."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES


def _never_drops(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """A fused attention kernel whose dropout is 0 draws nothing, whatever its tag says."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout_probability"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) == 0.0)
    return False
