"""Copies of a model and its inputs with fake tensors, or with real ones of another dtype; the originals stay."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from optpass.backend import compat


def fake_copy(
    mode: compat.FakeTensorMode,
    model: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    *,
    real: bool = False,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Model and inputs as copies, under `mode`, which must be active unless `real`.

    Args:
        mode: mode of the fakes; fake tensors that are in it already are used as they are.
        model: a module, a method of one, or any callable; what a plain function closes over is not copied.
        args, kwargs: inputs, searched in tuples, lists and dicts.
        dtype: what floating-point parameters, buffers and inputs become; None leaves them.
        real: copies with real tensors instead.
    """
    convert = _Converter(mode, dtype, real)
    owner = getattr(model, "__self__", None)
    if isinstance(model, nn.Module):
        model = convert.module(model)
    elif isinstance(owner, nn.Module):
        model = getattr(convert.module(owner), model.__name__)
    inputs, named = torch.utils._pytree.tree_map_only(torch.Tensor, convert.tensor, (tuple(args), kwargs))
    return model, inputs, named


class _Converter:
    """Tensors to their copies; equal tensors stay one, so that tied weights stay tied."""

    def __init__(self, mode: compat.FakeTensorMode, dtype: torch.dtype | None, real: bool) -> None:
        self.mode, self.dtype, self.real = mode, dtype, real

    def module(self, module: nn.Module) -> nn.Module:
        """A deep copy of `module` with every parameter, buffer and tensor attribute converted."""
        own = {id(t): t for t in (*module.parameters(), *module.buffers(), *_tensor_attributes(module))}
        memo: dict[int, Any] = {key: self.tensor(tensor) for key, tensor in own.items()}
        with contextlib.nullcontext() if self.real else compat.FakeCopyMode(self.mode):
            return copy.deepcopy(module, memo)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one tensor. A parameter stays a parameter, and needs a gradient if it did."""
        with torch.no_grad():
            value = self._value(tensor).detach()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value.requires_grad_() if tensor.requires_grad else value

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        if self.real:
            return tensor.to(dtype, copy=True)
        is_meta = tensor.device.type == "meta"
        if isinstance(tensor, compat.FakeTensor) and tensor.fake_mode is self.mode and not is_meta:
            return tensor.to(dtype)
        if (
            isinstance(tensor, compat.FakeTensor) or is_meta
        ):  # no data, or another mode's: only the metadata can be taken over
            device = torch.device("cpu") if is_meta else tensor.device
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        return self.mode.from_tensor(tensor, static_shapes=True).to(dtype)


def _tensor_attributes(module: nn.Module) -> list[torch.Tensor]:
    """Tensors kept as plain attributes of a module or of its submodules."""
    return [v for part in module.modules() for v in vars(part).values() if isinstance(v, torch.Tensor)]
