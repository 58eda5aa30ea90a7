"""Tensors that the program changes by hand from step to step: averages of the weights, momenta, weights of a target.

They are there while the graphs run, though no graph, loss or optimizer reads them. An update in place counts its
tensor's version up; one through `.data` does not, and shows in the values alone, of which a few are looked at.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from optpass.backend.memory.seen.leaves import Leaf
from optpass.backend.memory.seen.parameters import parameters_of
from optpass.backend.memory.seen.stores import Stores
from optpass.backend.memory.versions import first_trained, version_of
from optpass.passes.memory.optimizers.search import everything_held

#: So often it is looked: momenta are made in the first step, and change in the second.
LOOKS = 2
#: Bytes of a tensor from which on it counts.
LEAST = 64
#: Classes of tensors whose attributes run nothing of others.
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
#: So many values of each are compared, or some more.
VALUES = 13


@dataclass(frozen=True)
class _Look:
    tensor: weakref.ref[torch.Tensor]
    version: int
    values: str


class Updated:
    """What is found so from one step of one graph to the next."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] | None = None
        self._left = LOOKS
        self._version: int | None = None
        self._found = Stores()

    def look(self, step: Sequence[Leaf]) -> None:
        """A step of these graphs may have begun, of none before one was seen: they are told what has changed since the
        last one did and was not found before, aside from gradients and from what optimizers train and keep."""
        parameters = parameters_of(step)
        trained = first_trained(parameters)
        version = None if trained is None else version_of(trained)
        if not self._left or (self._looks is not None and version == self._version):
            return
        self._version = version
        tensors = [t for t in gc.get_objects() if type(t) in PLAIN and _counts(t)]
        held = Stores([*parameters, *everything_held()])
        held.update(self._found)
        held.add(t.grad for t in tensors if t.is_leaf and t.grad is not None)
        others = [t for t in tensors if not held.behind_any(t) and t.grad is None]
        found = [t for t in others if self._changed(t)]
        self._found.add(found)
        self._left -= self._looks is not None
        self._looks = {id(t): _Look(weakref.ref(t), t._version, _values(t)) for t in others} if self._left else {}
        for leaf in step if found else ():
            leaf.note_updated(found)

    def _changed(self, tensor: torch.Tensor) -> bool:
        look = (self._looks or {}).get(id(tensor))
        if look is None or look.tensor() is not tensor:
            return False
        return look.version != tensor._version or look.values != _values(tensor)


def _counts(tensor: torch.Tensor) -> bool:
    """Whether it is held in memory, of some size, and no result that is to be differentiated."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    try:
        storage = tensor.untyped_storage()
        there = storage.nbytes() >= LEAST and storage.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # of a transform, or of a CUDA graph that has run again
        return False
    return there and tensor.grad_fn is None and not tensor.is_inference()


def _values(tensor: torch.Tensor) -> str:
    """Some of its values; none where they do not lie one behind the other."""
    if not tensor.is_contiguous() or not tensor.is_floating_point():
        return ""
    flat = tensor.detach().view(-1)
    return str(flat[:: max(1, len(flat) // VALUES)].float().tolist())
