"""Which kernels Inductor merges where memory is short: none that would have to run before its time.

A plan computes a tensor again just before it is needed. Inductor's scheduler merges kernels that read the same buffers,
however far apart they stand, and runs them at the first one's place: what the others read has to be there by then, and
what they make waits. Inside `kept_apart()` two kernels with a library kernel between them are merged only where that
takes no more bytes. And its C++ puts kernels that follow each other into one function, which needs at once whatever one
of them reads or makes: inside `kept_apart()` a function ends where there is something to release. Results are the same
values.
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
    """Inside, Inductor merges no kernels over library kernels where that takes memory, and its C++ functions end where
    they are the last to read much."""
    from torch._inductor.scheduler import Scheduler

    known: dict[int, _Schedule] = {}

    def schedule(scheduler: Any) -> _Schedule:
        if id(scheduler) not in known:
            known.clear()  # one is lowered at a time
            known[id(scheduler)] = _Schedule(scheduler)
        return known[id(scheduler)]

    merges = getattr(Scheduler, "can_fuse", None)
    functions = _cpp_functions()
    ends = getattr(functions, "ready_to_flush", None)

    def can_fuse(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
        if schedule(self).takes_memory(node1, node2):
            return False
        return bool(merges(self, node1, node2, *args, **kwargs)) if merges is not None else False

    def ready_to_flush(self: Any) -> bool:
        if ends is not None and ends(self):
            return True
        scheduler = getattr(self, "scheduler", None)
        return scheduler is not None and schedule(scheduler).releases()

    with contextlib.ExitStack() as stack:
        if merges is not None:
            stack.enter_context(mock.patch.object(Scheduler, "can_fuse", can_fuse))
        if ends is not None:
            stack.enter_context(mock.patch.object(functions, "ready_to_flush", ready_to_flush))
        yield


def _cpp_functions() -> Any:
    """What puts kernels of CPUs into functions; None where this torch has it elsewhere."""
    try:
        from torch._inductor.codegen.cpp import CppScheduling
    except ImportError:
        return None
    return CppScheduling


class _Schedule:
    """One of Inductor's schedules before anything is merged, kernels in the order of the graph."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._bytes: dict[str, int] = {}
        self._small = 0.0
        #: Of a buffer that is made in parts, as for `torch.cat`: which other buffers the parts are.
        self._parts: dict[str, list[Any]] = {}
        try:
            self._library = sorted(n.min_order for n in scheduler.nodes if n.is_extern() or n.is_template())
            self._small = max((self._size(name) for name in scheduler.name_to_buf), default=0) * SMALL
            for buffer in scheduler.name_to_buf.values():
                whole = _whole(buffer.node)
                if whole is not None:
                    self._parts.setdefault(whole, []).append(buffer)
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

    def releases(self) -> bool:
        """Whether what has been generated and not been called yet is the last to read much."""
        try:
            names = self._scheduler.buffer_names_to_free
            graph = _graph()
            gone = graph.removed_buffers | graph.wrapper_code.freed  # never stored, or written over
            return sum(self._size(name) for name in names if name not in gone and self._ends(name)) > self._small
        except AttributeError:  # another torch notes it otherwise
            return False

    def _ends(self, name: str) -> bool:
        """Whether a buffer or an input goes with its last use."""
        buffer = self._scheduler.name_to_buf.get(name)
        return buffer is None or bool(buffer.can_free())

    def _more(self, first: Any, later: Any) -> int:
        """Bytes of what `later` makes, and of what is made for it between the two, less what it is the last to read."""
        inside = {node.get_name() for kernel in (first, later) for node in kernel.get_nodes()}
        more = self._made(first, later)
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

    def _made(self, first: Any, later: Any) -> int:
        """Bytes of what `later` makes: of a part, those of the whole, unless `first` or what is before it makes another
        part."""
        outputs = {buffer.get_name(): buffer.node for buffer in later.get_outputs()}
        wholes = {whole for node in outputs.values() if (whole := _whole(node)) is not None}
        early = {
            whole
            for whole in wholes
            for part in self._parts.get(whole, ())
            if part.get_name() not in outputs and _place(part) <= first.max_order
        }
        own = sum(self._size(name) for name, node in outputs.items() if _whole(node) is None)
        return own + sum(self._size(whole) for whole in wholes - early)

    def _size(self, name: str) -> int:
        if name not in self._bytes:
            layout = buffer_layout(name)
            self._bytes[name] = layout[0] * layout[1] if layout is not None else 0
        return self._bytes[name]


def _whole(node: Any) -> str | None:
    """The name of the buffer that another one is a part of; None for one of its own."""
    from torch._inductor import ir

    layout = getattr(node, "layout", None)
    return str(layout.view.get_name()) if isinstance(layout, ir.NonOwningLayout) else None


def _place(buffer: Any) -> float:
    """Where a buffer is made, in the order of the graph."""
    return float("inf") if buffer.defining_op is None else float(buffer.defining_op.min_order)


def _graph() -> Any:
    """The graph that is being lowered."""
    from torch._inductor.virtualized import V

    return V.graph
