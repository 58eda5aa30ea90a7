"""A compiled graph that rests on what some of its tensors held, and what runs in its place once they hold another.

Before each call every guarded tensor is looked at: the tensor object, its memory and strides, and torch's count of
writes to it. That takes less than a microsecond, and finds every write that torch knows of: in-place ops, `copy_` (so
`load_state_dict`), assigning `.data`, replacing the tensor. Where something differs, the contents are compared with
what was held; equal ones are watched on, others send the call to a version compiled without what rested on them.

What torch does not count: writes through `tensor.data`, through NumPy, DLPack or another alias of the memory, under
`torch.autograd._unsafe_preserve_version_counter`, and by foreign code. On CPU the contents themselves are compared now
and then (`PERIOD_BYTES`), so that such a write is found late; on other devices it is not found.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from optpass.backend.contents import Known, is_readable
from optpass.reporting import store

log = logging.getLogger(__name__)

#: Bytes of guarded CPU tensors compared per call, on average: half a microsecond at 8 GB/s.
PERIOD_BYTES = 4096
#: Calls between two such comparisons at least: one of a few bytes takes as long as launching an op.
MIN_PERIOD = 16
#: Bytes of guarded CPU tensors that are compared at every call all the same: a microsecond, ten at most.
ALWAYS_BYTES = 1 << 16
#: Comparisons in a row that found other contents, after which nothing is compared any more.
MAX_CHANGES = 16
#: Tensors remembered for one place: the layers of a model may run one graph, each with its own.
MAX_TENSORS = 1024


class Look(NamedTuple):
    """What tells cheaply that a tensor is untouched since its contents were compared.

    Attributes:
        storage: weak reference to its memory.
        version, pointer, stride: of the tensor.
        same: whether the contents were those that were compiled for.

    There is no reference to the tensor itself, since even a weak one makes `torch.utils.swap_tensors` refuse it.
    Another tensor at its address, over the same memory and with as many writes, has the same contents, unless an alias
    that torch does not count was written to.
    """

    storage: Any
    version: int
    pointer: int
    stride: tuple[int, ...]
    same: bool


def untouched(tensor: torch.Tensor, look: Look) -> bool:
    """Whether the tensor that `look` was taken of is as it was then. A new memory has perhaps no count of writes."""
    return (
        tensor.untyped_storage() is look[0]()
        and tensor._version == look[1]
        and tensor.data_ptr() == look[2]
        and tensor.stride() == look[3]
    )


class _Place:
    """One guarded input or constant of a graph, and the tensors seen there, by address."""

    def __init__(self, known: Known, reason: str) -> None:
        self.name, self.reason, self.held = known.name, reason, known.held
        #: A constant in a tuple of its own, and 0; or None, and the position among the arguments.
        self.constant = (known.tensor,) if known.position is None else None
        self.index = known.position or 0
        #: Of a small CPU tensor, its bytes.
        copy = self.held.copy
        small = copy is not None and copy.device.type == "cpu" and copy.nbytes <= ALWAYS_BYTES
        self.bytes = _bytes(copy) if copy is not None and small else None
        self.seen: dict[int, Look] = {}
        self.compare(known.tensor)  # not taken for granted: it may have been written to while the graph was compiled

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a small, untouched tensor still has the contents that were compiled for; False if that is not known.

        A microsecond. Operators of torch take ten in its place, most of that in what is called after them:
        they drive its code out of the caches.
        """
        if self.bytes is None or tensor.shape != self.held.shape or not tensor.is_contiguous():
            return False
        return _bytes(tensor) == self.bytes

    def compare(self, tensor: Any) -> bool:
        """Whether a tensor's contents are those that were compiled for; remembered where it can be recognised."""
        if not is_readable(tensor):
            return False
        storage = weakref.ref(tensor.untyped_storage())
        # Before the contents are read, so that a write in between shows at the next call.
        state = storage, tensor._version, tensor.data_ptr(), tensor.stride()
        same = self.held.same(tensor)
        seen = dict(self.seen) if len(self.seen) < MAX_TENSORS else {}
        seen[tensor._cdata] = Look(*state, same)
        self.seen = seen
        return same


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


class Guarded:
    """What `compiled` is where some of its rewrites rest on the contents of tensors.

    Args:
        compiled: takes the graph's inputs.
        guards: tensors, and what rests on the contents of each.
        without: gives the callable to use where contents differ; called once, when they first do.
        graph_id: id of the graph in the report.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        guards: Sequence[tuple[Known, str]],
        without: Callable[[], Callable[..., Any]],
        graph_id: str,
    ) -> None:
        self._compiled, self._without, self._graph_id = compiled, without, graph_id
        self._places = [_Place(known, reason) for known, reason in guards]
        self._fallback: Callable[..., Any] | None = None
        self._told: set[str] = set()
        self._changes = 0
        self._lock = threading.RLock()
        nbytes = sum(place.held.nbytes for place in self._places if place.held.device.type == "cpu")
        often = 1 if nbytes <= ALWAYS_BYTES else max(MIN_PERIOD, nbytes // PERIOD_BYTES)
        self._period = often if nbytes else sys.maxsize
        self._left = self._period

    def __call__(self, *args: Any) -> Any:
        same = True
        for place in self._places:
            tensor = (place.constant or args)[place.index]
            look = place.seen.get(tensor._cdata)
            if look is None or not untouched(tensor, look):
                return self._look(args, everything=False)(*args)
            same = same and look.same
        self._left -= 1
        if self._left <= 0:
            if not same or not all(place.holds((place.constant or args)[place.index]) for place in self._places):
                return self._look(args, everything=True)(*args)
            self._left = self._period
        return (self._compiled if same else self._replacement())(*args)

    def _look(self, args: Sequence[Any], *, everything: bool) -> Callable[..., Any]:
        """Compare contents, those of touched tensors or all, and say what to call."""
        with self._lock:
            self._left = self._period
            result = True
            for place in self._places:
                tensor = (place.constant or args)[place.index]
                look = place.seen.get(tensor._cdata)
                known = look is not None and untouched(tensor, look)
                same = look.same if look is not None and known and not everything else place.compare(tensor)
                if not same:
                    self._tell(place)
                result = result and same
            self._changes = 0 if result else self._changes + 1
            if self._changes >= MAX_CHANGES:
                self._places = []
                self._compiled = self._replacement()
                self._left = self._period = sys.maxsize
            return self._compiled if result else self._replacement()

    def _replacement(self) -> Callable[..., Any]:
        with self._lock:
            if self._fallback is None:
                self._fallback = self._without()
            return self._fallback

    def _tell(self, place: _Place) -> None:
        if place.name in self._told:
            return
        self._told.add(place.name)
        text = (
            f"graph {self._graph_id}: the contents of {place.name} are not those that the graph was compiled for "
            f"({place.reason}); such calls run a version compiled without that"
        )
        log.warning("%s", text)
        store.current().warn(text)
