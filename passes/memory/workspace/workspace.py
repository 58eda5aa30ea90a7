"""Bytes that an operator allocates and releases inside itself, beside its outputs, for eager and extern kernels.

A peak inside an operator is what lives before it, its outputs, and this. Formulas follow ATen's source and are tested
against measurement; an operator without one has no workspace that counts (scalars that are wrapped into tensors, at
most 16 bytes, are left out everywhere). What only the library knows (`asked` says of which operators) is asked of
`library`, which `backend.memory.probe` answers by running the operator. On CUDA there are no formulas: what is not
asked has no workspace, nor has anything where no GPU is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optpass.passes.memory.storage import nbytes
from optpass.passes.memory.workspace import elementwise
from optpass.passes.memory.workspace.asked import FORMULAS, is_kernel_of_gpu, is_library
from optpass.passes.memory.workspace.bodies import bodies_bytes
from optpass.passes.memory.workspace.call import Call, elements, number

#: Answers for operators of which only the library knows: bytes, or None where it cannot tell.
Library = Callable[[Call], int | None]

#: Operators that return statistics behind their first result.
_NORMS = frozenset({
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
})  # fmt: skip
#: Operators that run another one, their first or second argument, and keep the state of the CPU's generator meanwhile.
SAVES_STATE, WITH_STATE = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state


def workspace_bytes(node: fx.Node, library: Library | None = None) -> int:
    """Bytes that the operator of `node` allocates and releases inside itself; 0 where nothing is known.

    Reads `meta["val"]` of the node and of its arguments.
    """
    if node.op != "call_function" or not isinstance(
        node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    ):
        return 0
    args = fx.node.map_arg(node.args, _value)
    kwargs = fx.node.map_arg(node.kwargs, _value)
    return op_workspace(node.target, args, kwargs, node.meta.get("val"), library)


def op_workspace(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, library: Library | None = None
) -> int:
    """As `workspace_bytes`, of a call with its values: tensors, fake or not, for tensors."""
    if target is SAVES_STATE:
        return op_workspace(args[0], args[1:], kwargs, out[1] if isinstance(out, (list, tuple)) else None, library)
    if target is WITH_STATE:
        return nbytes(args[0], number) + op_workspace(args[1], args[2:], kwargs, out, library)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return bodies_bytes(target, args, lambda node: workspace_bytes(node, library), number)
    call = Call.of(target, args, kwargs, out)
    if call is None:
        return 0
    if _on_cpu(call):
        return call_workspace(call, library)
    return (library(call) or 0) if library is not None and is_kernel_of_gpu(call) else 0


def call_workspace(call: Call, library: Library | None = None) -> int:
    """As `op_workspace`, of a call that runs on a CPU, wherever its tensors are: those of a rehearsal are on `meta`."""
    if library is not None and is_library(call):
        measured = library(call)
        if measured is not None:
            return measured
    rule = FORMULAS.get(call.name)
    if rule is not None:
        return rule(call)
    return elementwise.promotion(call) if torch.Tag.pointwise in call.target.tags else 0


def retained_bytes(target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that the storage of the result holds beyond what its fake form says, on CPU."""
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    rule = elementwise.RETAINED.get(target.overloadpacket.__name__)
    if rule is None:
        return 0
    call = Call.of(target, args, kwargs, out)
    return rule(call) if call is not None and _on_cpu(call) else 0


def retained_parts(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> list[tuple[torch.Tensor, int]]:
    """Each tensor of a result whose storage holds more bytes than its fake form says, on CPU, with how many more."""
    if isinstance(out, torch.Tensor):
        extra = retained_bytes(target, args, kwargs, out)
        return [(out, extra)] if extra else []
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket.__name__ not in _NORMS:
        return []
    call = Call.of(target, args, kwargs, out)
    if call is None or not _on_cpu(call):
        return []
    # Of an input in half precision with parameters in float32 the statistics are in float32, which fake ones are not.
    given = [t for name, t in call.tensors() if name in ("weight", "bias", "running_mean", "running_var")]
    wide = max((t.element_size() for t in given), default=0)
    return [(t, elements(t) * (wide - t.element_size())) for t in out[1:3] if wide > t.element_size()]


def retained_bytes_of(node: fx.Node) -> int:
    """As `retained_bytes`, of a node with `meta["val"]`."""
    if node.op != "call_function":
        return 0
    args = fx.node.map_arg(node.args, _value)
    return retained_bytes(node.target, args, fx.node.map_arg(node.kwargs, _value), node.meta.get("val"))


def _value(node: fx.Node) -> Any:
    if node.op == "get_attr" and "val" not in node.meta:  # the graph inside a higher-order operator
        return _attribute(node)
    return node.meta.get("val")


def _attribute(node: fx.Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _on_cpu(call: Call) -> bool:
    result = call.result()
    return result is not None and result.device.type == "cpu"
