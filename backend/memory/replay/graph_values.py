"""The values of a graph's inputs and outputs, symbols replaced by the sizes that were seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from optpass.backend import compat, snapshot
from optpass.backend.memory.replay.wrapper import fake_tensor
from optpass.passes.memory.unbacked import UnboundedSizeError, value_of


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be changed, as lowering does."""
    return fx.GraphModule(gm, snapshot.copy_graph(gm.graph, keep=True))


def values_of_inputs(gm: fx.GraphModule) -> list[Any]:
    """`meta["val"]` of the placeholders."""
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def outputs_of(gm: fx.GraphModule) -> Sequence[Any]:
    """What the graph returns: nodes, and None or constants in their places."""
    outputs: Sequence[Any] = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args[0]
    return outputs


def concrete(value: Any, mode: compat.FakeTensorMode) -> Any:
    """A new fake tensor with the sizes of `value`, symbols replaced by the sizes that were seen; ints likewise."""
    if isinstance(value, torch.Tensor):
        return fake_tensor(mode, ints(value.shape), ints(value.stride()), value.dtype, value.device)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return hint(value)
    return value


def hint(value: Any) -> Any:
    """The value that a symbol had when it was traced; the most that it can be, where only running tells."""
    return value_of(value)


def sizes_read(gm: fx.GraphModule) -> dict[str, int]:
    """By the symbol's name, the most that each size can be that the graph reads from a tensor and something bounds."""
    found: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            with contextlib.suppress(UnboundedSizeError):
                found[str(value)] = int(hint(value))
    return found


def ints(sizes: Iterable[Any]) -> list[int]:
    """Sizes or strides as ints."""
    return [int(hint(size)) for size in sizes]


def contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that a contiguous tensor of that shape has."""
    strides, step = [], 1
    for size in reversed(ints(tensor.shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def laid_out_anew(tangents: Iterable[torch.Tensor]) -> int:
    """Bytes of the gradients of outputs that AOTAutograd copies into the layout of the outputs before the backward
    runs (`coerce_to_expected_memory_format`): all of them are there until the last has been copied.

    No gradient comes with gaps, as the view of a larger tensor has. Beside a loss in the graph, which is a number,
    the gradients of other outputs are zeros that autograd makes, and those are contiguous.
    """
    values = list(tangents)
    zeros = any(t.dim() == 0 for t in values)
    found = 0
    for t in values:
        dense, strides = contiguous(t), ints(t.stride())
        extent = 1 + sum((size - 1) * stride for size, stride in zip(ints(t.shape), strides, strict=True))
        gaps = extent != prod(ints(t.shape))
        if gaps or (zeros and list(dense) != strides):
            found += int(hint(t.numel())) * t.element_size()
    return found


def restrided(value: Any, saved: Any) -> Any:
    """`value` with the strides that the forward really gives it, as AOTAutograd compiles the backward."""
    if not isinstance(value, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return value
    if ints(value.stride()) == list(saved.stride()):
        return value
    with value.fake_mode if isinstance(value, compat.FakeTensor) else torch.no_grad():
        return value.as_strided(value.size(), saved.stride())


def output_sizes(gm: fx.GraphModule) -> tuple[set[int], set[int]]:
    """Elements of each output of a Dynamo graph, and rows."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    shapes = [ints(value.shape) for value in values if isinstance(value, torch.Tensor)]
    return {prod(shape) for shape in shapes}, {prod(shape[:-1]) for shape in shapes}
