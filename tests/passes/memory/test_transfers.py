"""Operators that copy to host memory and back: what they copy, what they hold, and what compilers see of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optpass.passes.memory import transfers


def out_and_back(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    host = transfers.OFFLOADED(transfers.OFFLOAD(x), x)
    return host, transfers.RELOADED(transfers.RELOAD(host, x.device), host, x.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (4, 1, 2), (0, 3)])
def test_a_copy_is_equal_and_laid_out_as_its_source(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for order in (range(len(shape)), reversed(range(len(shape)))):
        x = torch.randn(shape).mul(9).to(dtype).permute(*order)
        host, back = out_and_back(x)
        for copy in (host, back):
            assert torch.equal(copy, x) and copy.stride() == x.stride() and copy.dtype == dtype
            assert copy.numel() == 0 or copy.data_ptr() != x.data_ptr()


def test_host_memory_is_known_as_such_while_it_is_there() -> None:
    x = torch.randn(8)
    host, back = out_and_back(x)
    assert transfers.is_on_host(host) and transfers.is_on_host(host.detach().view(2, 4))
    assert not transfers.is_on_host(x) and not transfers.is_on_host(back)
    before = len(transfers._HOST)
    del host
    assert len(transfers._HOST) == before - 1


def test_a_default_device_moves_nothing() -> None:
    x = torch.randn(8)
    with torch.device("meta"):
        host, back = out_and_back(x)
    assert host.device == back.device == x.device and torch.equal(host, back)


def test_a_copy_goes_with_its_ticket() -> None:
    host, _ = out_and_back(torch.randn(8))
    ticket = transfers.RELOAD(host, torch.device("cpu"))
    gone = torch.multiprocessing.reductions.StorageWeakRef(getattr(ticket, transfers._COPY).memory.untyped_storage())
    del ticket
    gc.collect()
    assert gone.expired()


def test_a_source_that_was_not_kept_is_an_error() -> None:
    x = torch.randn(8)
    ticket = transfers.OFFLOAD(x)
    with pytest.raises(RuntimeError, match="offload='off'"):
        transfers.OFFLOADED(ticket, x.clone())


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.randn(3, 4), True),
        (torch.randn(3, 4).t(), True),
        (torch.randn(3, 4)[:, 1:], False),  # gaps
        (torch.randn(3, 1).expand(3, 4), False),
        (torch.randn(3, 4, dtype=torch.complex64).conj(), False),
        (torch.randn(3, 4).to_sparse(), False),
    ],
)
def test_what_can_be_copied(tensor: torch.Tensor, wanted: bool) -> None:
    assert transfers.is_copyable(tensor) is wanted


def test_nothing_returns_what_it_was_given() -> None:
    for operator in transfers.OPERATORS:
        schema = operator._schema
        assert not schema.is_mutable and all(a.alias_info is None for a in (*schema.arguments, *schema.returns))


def test_fake_tensors_are_as_the_real_ones() -> None:
    x = torch.randn(2, 3, 4).permute(2, 0, 1)
    real = out_and_back(x)
    with FakeTensorMode() as mode:
        fake = out_and_back(mode.from_tensor(x))
    for made, copy in zip(fake, real, strict=True):
        assert (made.shape, made.stride(), made.dtype) == (copy.shape, copy.stride(), copy.dtype)
        assert made.device == copy.device
