"""Facts about a model and its inputs read from their tensors: mode, device, size, dtype. Nothing here changes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from optpass.backend import compat
from optpass.errors import ConfigError


def owner(model: Any) -> nn.Module | None:
    """The module that a callable is, or is a method of; None for a plain function."""
    found = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def check_initialised(model: Any, what: str) -> None:
    """Raises ConfigError, beginning with `what`, where a lazy module has not learnt its sizes from a call yet."""
    module = owner(model)
    named = [*module.named_parameters(), *module.named_buffers()] if module is not None else []
    missing = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{what}: of the model's tensors, {missing[0]}{more} have no size yet, as in every lazy module that was "
            "never called; call the model once on its inputs first"
        )


def tensors(model: Any, inputs: Any) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and the tensors in the nested `inputs`, in this order, a shared one once."""
    module = owner(model)
    if module is not None:
        yield from module.parameters()
        yield from module.buffers()
    yield from input_tensors(inputs)


def input_tensors(inputs: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def mode_of(model: Any, inputs: Any) -> compat.FakeTensorMode | None:
    """The fake mode that the tensors were made in; None where none is fake."""
    return next((t.fake_mode for t in tensors(model, inputs) if isinstance(t, compat.FakeTensor)), None)


def data_free(model: Any, inputs: Any) -> bool:
    """Whether a tensor is fake or on the meta device, so that the model cannot be run."""
    return any(isinstance(t, compat.FakeTensor) or t.device.type == "meta" for t in tensors(model, inputs))


def data_bytes(model: Any, inputs: Any) -> int:
    """Bytes that the tensors take, or would take if they had data."""
    return sum(t.numel() * t.element_size() for t in tensors(model, inputs))


def device_of(model: Any, inputs: Any) -> torch.device | None:
    """The first device that is neither the CPU nor meta; else the CPU; None where there is no tensor."""
    found = [t.device for t in tensors(model, inputs)]
    return next((d for d in found if d.type not in ("cpu", "meta")), found[0] if found else None)


def parameter_count(model: Any) -> int:
    """Elements of the parameters, tied ones once."""
    module = owner(model)
    return sum(p.numel() for p in module.parameters()) if module is not None else 0


def main_dtype(model: Any, inputs: Any) -> str:
    """The floating dtype of most parameter elements, or of most input elements where there are no parameters; or ''."""
    module = owner(model)
    pool = list(module.parameters()) if module is not None else []
    sizes: dict[torch.dtype, int] = {}
    for tensor in pool or input_tensors(inputs):
        if tensor.is_floating_point() or tensor.is_complex():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=lambda d: sizes[d])).removeprefix("torch.") if sizes else ""


def described(inputs: Any) -> str:
    """The input tensors as `int64[1, 8192], float32[2, 3]`."""
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{[int(s) for s in t.shape]}" for t in input_tensors(inputs)
    )  # fmt: skip


def memory_bytes() -> int:
    """This machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
