"""Which kernels Inductor merges where memory is short: none that would have to run before its time.

A plan computes a tensor again just before it is needed. Inductor's scheduler merges kernels that read the same buffers,
however far apart they stand, and runs them at the first one's place: what the others read has to be there by then, and
what they make waits. Inside `kept_apart()` two kernels with a library kernel between them are merged only where that
takes no more bytes. Results are the same values.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any
from unittest import mock

from optpass.backend.compat.schedule import buffer_layout

#: Bytes that do not count, as a part of the graph's largest buffer.
SMALL = 1 / 16


@contextlib.contextmanager
def kept_apart() -> Iterator[None]:
    """Inside, Inductor merges no kernels over library kernels where that takes memory."""
    from torch._inductor.scheduler import Scheduler

    original = getattr(Scheduler, "can_fuse", None)
    if original is None:
        yield
        return
    known: dict[int, _Schedule] = {}

    def can_fuse(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
        if id(self) not in known:
            known.clear()  # one is lowered at a time
            known[id(self)] = _Schedule(self)
        if known[id(self)].takes_memory(node1, node2):
            return False
        return bool(original(self, node1, node2, *args, **kwargs))

    with mock.patch.object(Scheduler, "can_fuse", can_fuse):
        yield


class _Schedule:
    """One of Inductor's schedules before anything is merged, kernels in the order of the graph."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._bytes: dict[str, int] = {}
        try:
            self._library = sorted(n.min_order for n in scheduler.nodes if n.is_extern() or n.is_template())
            self._small = max((self._size(name) for name in scheduler.name_to_buf), default=0) * SMALL
        except AttributeError:  # another torch describes its schedule otherwise
            self._library = []

    def takes_memory(self, node1: Any, node2: Any) -> bool:
        """Whether the later of two kernels would run before its time, and more bytes would be live for that."""
        if not self._library:
            return False
        first, later = sorted((node1, node2), key=lambda node: node.min_order)
        at = bisect_right(self._library, first.max_order)
        if at == len(self._library) or self._library[at] > later.min_order:
            return False
        return self._more(first, later) > self._small

    def _more(self, first: Any, later: Any) -> int:
        """Bytes of what `later` makes, and of what is made for it between the two, less what it is the last to read."""
        inside = {node.get_name() for kernel in (first, later) for node in kernel.get_nodes()}
        more = sum(self._size(buffer.get_name()) for buffer in later.get_outputs())
        for name in {dependency.name for dependency in later.read_writes.reads}:
            buffer = self._scheduler.name_to_buf.get(name)
            if buffer is None:
                continue
            producer = buffer.defining_op
            if producer is None or producer.get_name() in inside:
                continue
            if producer.min_order > first.max_order:
                more += self._size(name)
            elif all(user.node.get_name() in inside for user in buffer.users):
                more -= self._size(name)
        return more

    def _size(self, name: str) -> int:
        if name not in self._bytes:
            layout = buffer_layout(name)
            self._bytes[name] = layout[0] * layout[1] if layout is not None else 0
        return self._bytes[name]
