"""What is asked of every call of a graph: the storages behind tensors, and what the call keeps for its backward."""

from __future__ import annotations

import gc

import torch
from torch.autograd.graph import saved_tensors_hooks

from optpass.backend.compat.memory_autograd import saved_by_function, saved_now
from optpass.backend.memory.seen.run import largest_own, own_storages
from optpass.backend.memory.seen.stores import Stores, storages_of


class Keeps(torch.autograd.Function):
    """Saves its input, what it returns, and two tensors of its own."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        small, large, out = torch.zeros(3), torch.zeros(50), x * 2
        ctx.save_for_backward(x, small, large, out)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


def test_what_is_kept_until_the_backward() -> None:
    x = torch.ones(1000, requires_grad=True)
    out = Keeps.apply(x)
    kept = saved_now(out.grad_fn)
    assert [t.numel() for t in kept] == [t.numel() for t in saved_by_function(out.grad_fn)] == [1000, 3, 50, 1000]
    made, given = Stores([out]), Stores([x])
    own = own_storages(kept, made, given)
    largest = largest_own(kept, made, given)
    assert largest is not None and largest().nbytes() == 200 == max(own.alive().values())
    assert sorted(own.alive().values()) == [12, 200]
    del kept
    out.sum().backward()
    gc.collect()
    assert largest() is None  # the backward let go of it, so that the run is over


def test_nothing_of_its_own() -> None:
    x = torch.ones(5, requires_grad=True)
    assert largest_own([x, x.detach()], Stores(), Stores([x])) is None


def test_what_hooks_pack_is_not_unpacked() -> None:
    x = torch.ones(4, requires_grad=True)
    unpacked = []
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: unpacked.append(1) or t):
        out = Keeps.apply(x)
        assert saved_now(out.grad_fn) == []
    assert saved_by_function(out.grad_fn) == [] and not unpacked


def test_storages_behind_views_parameters_and_what_is_sparse() -> None:
    whole = torch.zeros(10)
    parameter = torch.nn.Parameter(torch.zeros(2))
    sparse = torch.zeros(3, 3).to_sparse()
    assert [s._cdata for s in storages_of(whole[2:])] == [whole.untyped_storage()._cdata]
    assert len(storages_of(parameter)) == 1 and len(storages_of(sparse)) == 2
    stores = Stores([whole, whole[1:], parameter, sparse])
    assert stores and sorted(stores.alive().values()) == [0, 0, 8, 40] and not Stores()
