"""Tensors that stand for others."""

from __future__ import annotations

from typing import Any

import torch

from optpass.backend.memory.measure import storage_bytes
from optpass.passes.memory.optimizers.rehearsal import sizes_of
from optpass.passes.roofline.extract import concrete
from optpass.passes.wrappers import nbytes_of, plain_tensors


class Shard(torch.Tensor):
    """As large as four processes' parts, of which this one holds its own; and something that is no tensor."""

    part: torch.Tensor
    mesh: object

    def __new__(cls, part: torch.Tensor) -> Shard:
        shape = (4 * part.shape[0], *part.shape[1:])
        made: Shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype)
        made.part, made.mesh = part, object()
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["part", "mesh"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_what_this_process_holds_counts() -> None:
    part = torch.randn(2, 3)
    shard = Shard(part)
    assert shard.shape == (8, 3)
    assert [t is part for t in plain_tensors(shard)] == [True] and plain_tensors(part) == [part]
    assert storage_bytes([shard]) == part.nbytes
    assert sizes_of([shard]) == sizes_of([part])
    assert concrete(shard, int).shape == (2, 3)


def test_parts_of_parts() -> None:
    part = torch.randn(1)
    assert [t is part for t in plain_tensors(Shard(Shard(part)))] == [True]


def test_what_a_sparse_tensor_holds_counts() -> None:
    table = torch.nn.Embedding(100, 4, sparse=True)
    table(torch.tensor([3, 3, 7])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None and gradient.layout is torch.sparse_coo
    assert nbytes_of(gradient) == storage_bytes([gradient]) == 3 * 8 + 3 * 4 * 4
    rows = torch.eye(4).to_sparse_csr()
    assert nbytes_of(rows) == 5 * 8 + 4 * 8 + 4 * 4 and nbytes_of(torch.eye(4).to_sparse_csc()) == nbytes_of(rows)
