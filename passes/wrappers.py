"""Tensors that stand for others: a DTensor for its shard, a subclass for the parts that it is made of, a sparse one for
its indices and values."""

from __future__ import annotations

import torch

#: Classes that are no wrappers; asking a tensor for an attribute that it lacks takes longer than all else here.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the bytes of `tensor`: itself, or the parts of a wrapper or of a sparse one."""
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor] if tensor.layout is torch.strided else _parts_of_sparse(tensor)
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # a mesh of devices is one, too
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in plain_tensors(part)]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements that `tensor` has, or its parts."""
    return sum(part.nbytes for part in plain_tensors(tensor))


def _parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values, as they lie in memory; the tensor itself of a layout that is not a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
