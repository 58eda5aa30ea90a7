"""Shared by tests of any folder: comparing a compiled callable with eager, against a float64 reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Run:
    """Outputs of one call, flat, and the gradients of inputs and parameters, by name."""

    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor]


def run(model: Any, inputs: Sequence[Any], call: Callable[..., Any] | None = None, seed: int = 0) -> Run:
    """Call `call` (default `model`) on copies of `inputs` and go backward through the sum of all outputs, weighted.

    Args:
        model: where parameters are; a module or any callable.
        inputs: tensors; floating ones that need a gradient get one.
        call: what is called; the compiled form of `model`.
        seed: of the weights of the outputs in the loss.
    """
    own = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    for parameter in parameters.values():
        parameter.grad = None
    out = (model if call is None else call)(*own)
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    wanted = [t for t in leaves if t.requires_grad]
    if wanted:
        device = wanted[0].device
        generator = torch.Generator(device).manual_seed(seed)
        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64, device=device) for t in wanted]
        terms = [(t * w.to(t.dtype)).sum() for t, w in zip(wanted, weights, strict=True)]
        sum(terms[1:], start=terms[0]).backward()
    grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    grads |= {f"input {i}": t.grad for i, t in enumerate(own) if isinstance(t, torch.Tensor) and t.grad is not None}
    return Run([t.detach() for t in leaves], grads)


def in_double(model: Any, inputs: Sequence[Any]) -> Run:
    """The reference: the same call with parameters, buffers and inputs in float64, eagerly."""
    exact = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    wide = [
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]
    return run(exact, wide)


def assert_no_less_exact(reference: Run, candidate: Run, competitor: Run, slack: float = 2.0) -> None:
    """Every output and gradient of `candidate` is as near to the float64 `reference` as `competitor` is.

    Near is the largest absolute error; `slack` allows for another order of summation, and one unit in the last place
    of the largest element is always allowed.
    """
    assert reference.grads.keys() == candidate.grads.keys() == competitor.grads.keys()
    assert len(reference.outputs) == len(candidate.outputs) == len(competitor.outputs)
    named = [(f"output {i}", *both) for i, both in enumerate(zip(reference.outputs, candidate.outputs, strict=True))]
    named += [(f"grad of {k}", reference.grads[k], candidate.grads[k]) for k in reference.grads]
    theirs = [*competitor.outputs, *(competitor.grads[k] for k in reference.grads)]
    for (name, exact, ours), eager in zip(named, theirs, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape, name
        if not eager.is_floating_point():
            assert torch.equal(ours, eager), name
            continue
        unit = torch.finfo(eager.dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
        error = float((ours.double() - exact.double()).abs().max()) if exact.numel() else 0.0
        allowed = float((eager.double() - exact.double()).abs().max()) if exact.numel() else 0.0
        assert error <= slack * allowed + unit, f"{name}: error {error:.3g}, eager's own {allowed:.3g}"
