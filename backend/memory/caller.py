"""What the function holds that runs a step: tensors in its variables which no graph is given.

A target of which the loss reads a slice, a batch that eager code has made the graph's inputs of: all of that is there
throughout the step. What those functions hold that call this one is theirs, and no part of the step; nor are copies of
parameters and gradients, which averages of weights and comparisons keep.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from optpass.backend.compat import memory_autograd as autograd


def held_in_backward(devices: Iterable[torch.device], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """By the function that asked for the running backward, on one of `devices`, in whatever thread it runs."""
    return _data(autograd.tensors_of_callers(1, ("torch", "optpass")), devices, parameters)


def held_in_call(devices: Iterable[torch.device], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """By the function in whose call a graph is being compiled, on one of `devices`."""
    return _data(autograd.tensors_around_compile(1), devices, parameters)


def _data(
    held: Iterable[torch.Tensor], devices: Iterable[torch.device], parameters: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Without a gradient, and not of the shape and dtype of one of `parameters`."""
    wanted, copies = set(devices), {(p.shape, p.dtype) for p in parameters}
    leaves = [t for t in held if t.grad_fn is None and not t.requires_grad and t.device in wanted]
    return [t for t in leaves if (t.shape, t.dtype) not in copies]
