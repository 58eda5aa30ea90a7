"""Parameters of the graphs of a step: which take part in it, which are trained, and which gradients lie there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from optpass.backend.memory.seen.stores import Stores

if TYPE_CHECKING:
    from optpass.backend.memory.seen.leaves import Leaf


def alive(references: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for reference in references if (tensor := reference()) is not None]


def idle_in(leaves: Iterable[Leaf]) -> list[torch.Tensor]:
    """Parameters of their modules that nothing trains in the step of `leaves`: no graph of it, and no eager code that
    was seen in it."""
    leaves = list(leaves)
    found = {id(p): p for leaf in leaves for p in alive(leaf.idle)}
    graphs = {id(p) for leaf in leaves for p in alive(leaf.own)}
    eager = {key for leaf in leaves for key in leaf.known if key not in graphs}
    trained = eager.union(*(leaf.trained() for leaf in leaves))
    return [p for key, p in found.items() if key not in trained]


def parameters_of(leaves: Iterable[Leaf]) -> list[torch.Tensor]:
    """All parameters that `leaves` know, as far as they are alive, each once."""
    found = {key: reference() for leaf in leaves for key, reference in leaf.known.items()}
    return [parameter for parameter in found.values() if parameter is not None]


def own_of(parameters: Iterable[torch.Tensor], leaves: Sequence[Leaf]) -> list[torch.Tensor]:
    """Those of `parameters` that are no inputs of `leaves`: a view of a batch may be made to need a gradient, and is
    gone when the batch is not (the feature encoders of speech models do so for checkpoints)."""
    return [
        p
        for p in parameters
        if isinstance(p, torch.nn.Parameter) or not any(leaf.inputs.has(p.untyped_storage()) for leaf in leaves)
    ]


def lying_gradients(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of gradients of those of `parameters` that are frozen now, such as a critic's while the generator is
    trained."""
    return Stores(p.grad for p in parameters if not p.requires_grad and p.grad is not None).bytes()


def gradients_of(leaves: Iterable[Leaf]) -> dict[int, int]:
    """Bytes of the gradients that are there, by the identity of the parameter."""
    there = {id(p): Stores([p.grad]).alive() for p in parameters_of(leaves) if p.grad is not None}
    return {key: sum(sizes.values()) for key, sizes in there.items()}
