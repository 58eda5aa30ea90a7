"""What the reference models share: the dtype they are built in, and one scalar loss for any model's output.

No model and no size lives here, and no attention: each model writes its own, as people do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from optpass.errors import ConfigError

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new parameters and float tensors are `dtype`; the former default comes back on the way out.

    Models are built inside it instead of cast with `module.to(dtype)`, which cannot swap parameters under a
    FakeTensorMode. Raises ConfigError for a dtype that parameters cannot be trained in.
    """
    if dtype not in FLOAT_DTYPES:
        raise ConfigError(f"cannot build a model in {dtype}: choose from {', '.join(map(str, FLOAT_DTYPES))}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def loss(output: object) -> Tensor:
    """One scalar to call `backward()` on, for the output of any model.

    Where `output` holds scalar (0-dim) floating tensors, the model has computed its own loss: their sum. Otherwise
    the sum over all floating tensors of the mean of their squares, accumulated in at least float32. Tuples, lists and
    mappings (such as the outputs of transformers) are searched, nested ones too. Raises ConfigError where no
    floating tensor is found.
    """
    found = _floating(output)
    if not found:
        raise ConfigError(f"no floating-point tensor in the model's output ({type(output).__name__}) to train on")
    own = [tensor for tensor in found if tensor.dim() == 0]
    terms = own or [_wide(tensor).square().mean() for tensor in found]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _floating(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in _floating(part)]
    return []
