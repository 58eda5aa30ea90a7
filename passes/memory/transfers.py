"""Operators that copy a saved tensor to host memory and back, beside the computing of a GPU.

A copy out is `offloaded(offload(x), x)`, one back `reloaded(reload(host, device), host, device)`. The first half of
each begins the copy on a stream of its own and returns at once: a ticket, which holds the memory that is copied to. The
second half makes the computing stream wait for the copy, and returns that memory. None of the four returns what it was
given, so that compilers may reuse whatever they may reuse otherwise; and the second half reads the source, so that
neither a compiler nor the allocator gives the source's memory away while it is being read. What is made on the device
is allocated on the computing stream: how much memory a step needs does not depend on how fast copies are. Pinned memory
goes back to torch's host allocator, which waits for the copies that it was told of.

On devices without streams (a CPU, in tests) a copy is done when its first half returns.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("optpass", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
#: Any layout will do. A compiler that makes its own buffers must give both halves the same one, and lay out as the
#: graph says what is copied out, since the copy is handed on: `backend.compat.lowerings` sees to it for Inductor.
_TAGS = tuple(
    tag for name in ("flexible_layout", "pt2_compliant_tag") if (tag := getattr(torch.Tag, name, None)) is not None
)
_LIBRARY.define("offload(Tensor source) -> Tensor", tags=_TAGS)
_LIBRARY.define("offloaded(Tensor ticket, Tensor source) -> Tensor", tags=_TAGS)
_LIBRARY.define("reload(Tensor source, Device device) -> Tensor", tags=_TAGS)
_LIBRARY.define("reloaded(Tensor ticket, Tensor source, Device device) -> Tensor", tags=_TAGS)

#: Streams of copies, by device and direction: out of it, and back.
_STREAMS: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
#: Storages in host memory that hold the copy of a tensor, by their place in memory.
_HOST: dict[int, weakref.ref[torch.UntypedStorage]] = {}
#: The attribute of a ticket that is its copy.
_COPY = "optpass_copy"


class _Copy:
    """A copy that was begun.

    Attributes:
        memory: what it writes to.
        source: address of what it reads.
        device: whose computing it runs beside.
        end: where its stream is done with it; None where it is done already.
    """

    __slots__ = ("device", "end", "memory", "source")

    def __init__(self, memory: Tensor, source: int, device: torch.device, end: torch.cuda.Event | None) -> None:
        self.memory, self.source, self.device, self.end = memory, source, device, end

    def wait(self) -> Tensor:
        """The memory, for whatever the computing stream is given from now on."""
        end, self.end = self.end, None
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)
        return self.memory

    def __del__(self) -> None:
        if self.end is not None:  # an error in between: the memory is written to until then
            self.wait()


def is_copyable(tensor: Tensor) -> bool:
    """Whether the tensor's sizes are known and its elements are all that its span has: what a copy asks of it."""
    if tensor.layout != torch.strided or not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        return False
    step = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride != step:
                return False
            step *= extent
    return not tensor.is_conj() and not tensor.is_neg()


def is_on_host(tensor: Tensor) -> bool:
    """Whether the tensor is a copy in host memory, and takes none of its device's."""
    if not _HOST or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    reference = _HOST.get(tensor.untyped_storage()._cdata)
    return reference is not None and reference() is not None


def host_memory(source: Tensor) -> Tensor:
    """Memory on the host for a copy of `source`: pinned, so that copies run beside the computing."""
    return torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device="cpu", pin_memory=source.device.type == "cuda"
    )


def _offload(source: Tensor) -> Tensor:
    host = host_memory(source)
    storage = host.untyped_storage()
    key = storage._cdata
    _HOST[key] = weakref.ref(storage, lambda gone: _forget(key, gone))
    return _begin(source, host, source.device, out=True)


def _reload(source: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    return _begin(source, memory, memory.device, out=False)


def _begin(source: Tensor, memory: Tensor, device: torch.device, *, out: bool) -> Tensor:
    """Begin to copy between `device` and the host, behind all that the computing stream was given so far: a ticket."""
    end = None
    with torch.no_grad():
        if device.type == "cuda":
            stream = _STREAMS.get((device, out))
            if stream is None:
                new: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
                stream = _STREAMS.setdefault((device, out), new)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                _flat(memory).copy_(_flat(source), non_blocking=True)
                end = stream.record_event()
        else:
            _flat(memory).copy_(_flat(source))
    ticket = torch.empty(1, dtype=torch.int64, device="cpu")
    setattr(ticket, _COPY, _Copy(memory, source.data_ptr(), device, end))
    return ticket


def _end(ticket: Tensor, source: Tensor, device: torch.device | None = None) -> Tensor:
    copy: _Copy = getattr(ticket, _COPY)
    delattr(ticket, _COPY)
    if copy.source != source.data_ptr():  # nothing may be computed from what may have been written over
        raise RuntimeError(
            "optpass: what is copied to or from host memory was not kept until it was; set offload='off'"
        )
    return copy.wait()


def _forget(key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
    if _HOST.get(key) is gone:  # else another storage has its place by now
        del _HOST[key]


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's span as one row: a copy of it is one transfer, whatever the order of dims."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * stride for extent, stride in sizes) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,))


def _fake_ticket(source: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_offloaded(ticket: Tensor, source: Tensor) -> Tensor:
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cpu")


def _fake_reloaded(ticket: Tensor, source: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)


for _name, _run, _fake in (
    ("offload", _offload, _fake_ticket),
    ("offloaded", _end, _fake_offloaded),
    ("reload", _reload, _fake_ticket),
    ("reloaded", _end, _fake_reloaded),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"optpass::{_name}", _fake, lib=_LIBRARY)

OFFLOAD: Any = torch.ops.optpass.offload.default
OFFLOADED: Any = torch.ops.optpass.offloaded.default
RELOAD: Any = torch.ops.optpass.reload.default
RELOADED: Any = torch.ops.optpass.reloaded.default
#: All of them: their places in a graph are those that a plan has them at.
OPERATORS = (OFFLOAD, OFFLOADED, RELOAD, RELOADED)
