"""Bytes of storages that live, counted as an allocator counts them: each storage once, until its last tensor is gone.

The tensors are fake: they have sizes and share storages as real ones do, and take no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optpass.backend.memory.probe import library_workspace
from optpass.backend.memory.replay.caching import CachingAllocator
from optpass.passes.memory import transfers
from optpass.passes.memory.workspace.workspace import op_workspace, retained_parts


@dataclass(frozen=True)
class Moment:
    """A point in time of a replay: what ran last, and the bytes that were allocated then.

    Attributes:
        lent_bytes: part of them, which nobody but the caller holds.
        released_bytes: what would be there, too, were the graph kept for another backward.
    """

    label: str
    live_bytes: int
    lent_bytes: int = 0
    released_bytes: int = 0


class Storages:
    """The storages of one replay.

    Attributes:
        live: bytes allocated now, above what was there at the start.
        peak: the most there ever were; `peak_label` says what ran then.
        timeline: one `Moment` per operation.
        unsound: something computes with what was copied to host memory, where it may not have arrived; or what is
            copied is not kept until it is.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.peak_label = ""
        self.timeline: list[Moment] = []
        self.unsound = False
        self._known: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, int] = {}  # of those on CUDA
        self._cuda = CachingAllocator()
        self._lent: set[int] = set()
        self._only_lent = 0
        self._saved: set[int] = set()
        self._released = 0
        self._coming: dict[int, torch.Tensor] = {}  # by the storages of their tickets: what is copied back to
        self._under_way: set[tuple[int, int]] = set()  # storages of tickets, and of what is copied
        self._host: set[int] = set()  # storages of copies in host memory

    def lend(self, values: list[Any]) -> None:
        """The caller holds `values` on: they count to the end, also when nobody else does any more."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._lent.update(part.untyped_storage()._cdata for part in strided_parts(value))

    def save(self, values: Iterable[Any]) -> None:
        """`values` are saved for the backward, which may release them."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._saved.update(part.untyped_storage()._cdata for tensor in tensors for part in strided_parts(tensor))

    def external(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor` was there at the start and stays: it never counts."""
        for part in strided_parts(tensor):
            self._watch(part.untyped_storage(), 0)

    def add(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor` is allocated, if it is new."""
        for part in strided_parts(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in self._known:
                size = storage.nbytes()
                if tensor.device.type == "cuda" and size:
                    block = self._blocks[storage._cdata] = self._cuda.allocate(size)
                    size = self._cuda.size(block)
                self._watch(storage, size)

    def grow(self, tensor: torch.Tensor, extra: int) -> None:
        """The storage of `tensor` holds `extra` bytes more than its fake form says."""
        key = tensor.untyped_storage()._cdata
        if extra and self._sizes.get(key):
            self._sizes[key] += extra
            self.live += extra

    def ran(self, label: str, target: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """An operator has run: its new outputs are allocated, and `label` notes what it took inside itself."""
        if target in transfers.OPERATORS:
            self._copied(target, args, out)
            self.mark(label)
            return
        self.read(args)
        self.add_all(out)
        for part, extra in retained_parts(target, args, kwargs, out):
            self.grow(part, extra)
        self.mark(label, op_workspace(target, args, kwargs, out, library_workspace))

    def read(self, args: Iterable[Any]) -> None:
        """Something computes with `args`."""
        if self._host:
            leaves = torch.utils._pytree.tree_leaves(list(args))
            self.unsound |= any(isinstance(a, torch.Tensor) and self._on_host(a) for a in leaves)

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._host

    def _copied(self, target: Any, args: Any, out: Any) -> None:
        """Host memory never counts; what is copied back to is allocated with its ticket."""
        begins = target in (transfers.OFFLOAD, transfers.RELOAD)
        ticket, source = (out, args[0]) if begins else args[:2]
        key = ticket.untyped_storage()._cdata, source.untyped_storage()._cdata
        if begins:
            self._under_way.add(key)
        else:
            self.unsound |= key not in self._under_way
            self._under_way.discard(key)
        if target is transfers.RELOAD:
            with source.fake_mode:
                memory = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=args[1])
            self.add(memory)
            self._coming[out.untyped_storage()._cdata] = memory
        if target is transfers.RELOADED:
            self._become(self._coming.pop(ticket.untyped_storage()._cdata), out)
        else:
            self.external(out)
        if target is transfers.OFFLOADED:
            self._host.add(out.untyped_storage()._cdata)

    def _become(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """The storage of `out` is that of `memory` from now on."""
        key, storage = memory.untyped_storage()._cdata, out.untyped_storage()
        size, self._sizes[key] = self._sizes[key], 0
        self.live -= size
        self._watch(storage, size)
        if key in self._blocks:
            self._blocks[storage._cdata] = self._blocks.pop(key)

    def add_all(self, values: Any) -> None:
        """`add` for each tensor in a nest of lists and tuples."""
        if isinstance(values, torch.Tensor):
            self.add(values)
        elif isinstance(values, (list, tuple)):
            for value in values:
                self.add_all(value)

    def size(self, tensor: torch.Tensor) -> int:
        """Bytes that the storage of `tensor` counts for."""
        return sum(self._sizes.get(part.untyped_storage()._cdata, 0) for part in strided_parts(tensor))

    def more_in_later_steps(self) -> int:
        """Bytes by which later steps of the process may need more on a GPU, where what was free is in pieces."""
        return self._cuda.more_in_later_steps()

    def mark(self, label: str, workspace: int = 0) -> None:
        """`label` has run: note the bytes, with the `workspace` that it allocated and released inside."""
        now = self.live + workspace
        self.timeline.append(Moment(label, now, self._only_lent, self._released))
        if now > self.peak:
            self.peak, self.peak_label = now, label

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        # The Python object of a storage lives as long as the storage itself does, whoever holds that.
        self._known[key] = weakref.ref(storage, lambda _: self._release(key))
        self._sizes[key] = size
        self.live += size

    def _release(self, key: int) -> None:
        del self._known[key]
        self._host.discard(key)
        size = self._sizes.pop(key)
        block = self._blocks.pop(key, None)
        if block is not None and key not in self._lent:
            self._cuda.release(block)
        if key in self._lent:
            self._lent.discard(key)
            self._only_lent += size
        else:
            self.live -= size
            self._released += size if key in self._saved else 0
        self._saved.discard(key)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Inside, what each operator allocates is counted in `storages`, and each is a moment of the timeline."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.result(func, args, kwargs or {})
        self._storages.ran(str(func), func, args, kwargs or {}, out)
        return out

    def result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        return func(*args, **kwargs)


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the bytes of `tensor`: itself, or the indices and values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
