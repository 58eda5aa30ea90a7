"""Tensors that stand for others: a DTensor for its shard, a subclass for the parts that it is made of."""

from __future__ import annotations

import torch

#: Classes that are no wrappers; asking a tensor for an attribute that it lacks takes longer than all else here.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the bytes of `tensor`: itself, or the parts of a wrapper."""
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # a mesh of devices is one, too
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in plain_tensors(part)]
