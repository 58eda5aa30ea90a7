"""What the function holds that runs a step: tensors in its variables which no graph is given.

A target of which the loss reads a slice, a batch that eager code has made the graph's inputs of: all of that is there
throughout the step. What those functions hold that call this one is theirs, and no part of the step; nor are copies of
all parameters or gradients, which averages of weights and comparisons keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from optpass.backend.compat.memory_callers import named_by_caller, variables_around_compile, variables_of_callers


def held_in_backward(devices: Iterable[torch.device], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """By the function that asked for the running backward, on one of `devices`, in whatever thread it runs."""
    return _data(variables_of_callers(1, ("torch", "optpass")), devices, parameters)


def named_in_backward(devices: Iterable[torch.device], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """As `held_in_backward`, without what is in lists, which grow; and inputs that need a gradient, with their own."""
    wanted, held = set(devices), named_by_caller(("torch", "optpass"))
    inputs = [t for variable in held for t in variable if t.is_leaf and t.requires_grad and t.device in wanted]
    inputs = [t for t in inputs if not isinstance(t, torch.nn.Parameter)]
    return [*_data(held, wanted, parameters), *inputs, *(t.grad for t in inputs if t.grad is not None)]


def held_in_call(
    devices: Iterable[torch.device], parameters: Iterable[torch.Tensor], callers: int = 1
) -> list[torch.Tensor]:
    """By the function in whose call a graph is being compiled, on one of `devices`; where a graph has run, its own code
    is the first of so many `callers`."""
    return _data(variables_around_compile(callers), devices, parameters)


def _data(
    held: Iterable[Sequence[torch.Tensor]], devices: Iterable[torch.device], parameters: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Without a gradient, and not in a variable that holds a copy of each of `parameters`: a batch may have the shape
    of a weight, but does not come with tensors of the shapes of all others."""
    wanted, alike = set(devices), Counter((p.shape, p.dtype) for p in parameters)
    found: dict[int, torch.Tensor] = {}
    copies: set[int] = set()
    for variable in held:
        found.update((id(t), t) for t in variable if _is_data(t) and t.device in wanted)
        mine = [t for t in variable if (t.shape, t.dtype) in alike]
        if len(mine) > 1 and not alike - Counter((t.shape, t.dtype) for t in mine):
            copies.update(id(t) for t in mine)
    return [t for key, t in found.items() if key not in copies]


def _is_data(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None and not tensor.requires_grad
