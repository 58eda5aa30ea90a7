"""Models that are there in a step and that no graph of it trains: a frozen teacher, an encoder, an average of weights.

Eager code that reads them without gradients leaves no trace of it. What lies on the device counts while it is alive.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from optpass.backend import compat
from optpass.backend.memory.seen.stores import Stores
from optpass.units import format_bytes


def said_of(elsewhere: Stores) -> tuple[str, ...]:
    """That it counts."""
    size = elsewhere.bytes()
    what = "of frozen models, and of what the program changes by hand from step to step, count as buffers"
    return (f"{format_bytes(size)} {what}",) if size else ()


def live(kind: type) -> list[Any]:
    """What the garbage collector tracks that is of a class or of one that inherits it.

    `type`, not `isinstance`: that asks `__class__`, which objects of others may answer with side effects.
    """
    known: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        cls = type(thing)
        if cls not in known:
            known[cls] = issubclass(cls, kind)
        if known[cls]:
            found.append(thing)
    return found


def frozen_models(read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of models that are alive on the devices of `read` and not trained, but for what shares memory with it.

    A model counts if all of its parameters are frozen, or if it is torch's average of another one's. Of a module that
    holds what is read, or what holds that, its frozen parts count.

    Args:
        read: parameters, buffers and inputs of a graph.
    """
    own, devices = Stores(read), {t.device for t in read}
    found: dict[int, torch.Tensor] = {}
    for module in _outermost(live(nn.Module)):
        for tensor in _untrained(module, own):
            if tensor.device in devices and not own.behind_any(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def tensors_in(module: nn.Module) -> Iterator[torch.Tensor]:
    """Its parameters and buffers, as far as they are there."""
    for own in _within(module):
        for held in ("_parameters", "_buffers"):
            for tensor in dict(vars(own).get(held) or {}).values():
                kind = type(tensor)
                if issubclass(kind, torch.Tensor) and not issubclass(
                    kind, (UninitializedBuffer, UninitializedParameter, compat.FakeTensor)
                ):
                    yield tensor


def _untrained(module: nn.Module, read: Stores) -> list[torch.Tensor]:
    tensors = list(tensors_in(module))
    trained = any(t.requires_grad for t in tensors)
    if not trained:
        return tensors if any(isinstance(t, nn.Parameter) for t in tensors) else []
    if any(read.behind_any(t) for t in tensors):
        parts = [part for part in _children(module) if not issubclass(type(part), AveragedModel)]
        averages = [t for own in _within(module) if issubclass(type(own), AveragedModel) for t in tensors_in(own)]
        frozen = [t for part in parts for t in _untrained(part, read)]
        return [*averages, *frozen, *(t for t in _own(module) if not t.requires_grad)]
    return tensors if any(issubclass(type(own), AveragedModel) for own in _within(module)) else []


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    children = {id(t) for child in _children(module) for t in tensors_in(child)}
    return (t for t in tensors_in(module) if id(t) not in children)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inner]


def _children(module: nn.Module) -> list[nn.Module]:
    """One that is being constructed has none yet."""
    held = dict(vars(module).get("_modules") or {}).values()
    return [child for child in held if issubclass(type(child), nn.Module)]


def _within(module: nn.Module) -> list[nn.Module]:
    """The module and all in it, each once."""
    found: dict[int, nn.Module] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += _children(one)
    return list(found.values())
