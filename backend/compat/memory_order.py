"""Inductor's order of kernels, and what it fuses, where memory is short: nothing waits for longer than it must.

Inductor takes the best of four orders by its own estimate of the peak, in which views that operators make are memory of
their own. Inside `tightened()` that order and the program's are handed to a better search; a product is not kept
waiting for a sum that it could be fused with; a buffer that nobody reads any more is not kept for a later kernel; and
kernels are merged where that takes no memory (`memory_fusion`). Results are the same values, but for the rounding of
such a sum. How an order is found is not decided here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx

from optpass.backend.compat.memory_fusion import kept_apart
from optpass.passes.memory.transfers import OPERATORS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduledBuffer:
    """One buffer of Inductor's schedule, by numbers of its kernels.

    Attributes:
        made: bytes that are allocated when its kernel runs (when the schedule begins, for an input).
        freed: bytes that are released behind its last use.
        producer: its kernel; -1 for an input.
        users: kernels that read it.
        returned: it lives to the end.
    """

    made: int
    freed: int
    producer: int
    users: tuple[int, ...]
    returned: bool = False


#: From what must precede each kernel, the buffers, which kernels may write over an input, and another order to begin
#: with: the order.
Improve = Callable[[Sequence[frozenset[int]], Sequence[ScheduledBuffer], Sequence[bool], Sequence[int]], Sequence[int]]


@contextlib.contextmanager
def tightened(improve: Improve | None) -> Iterator[None]:
    """Inside, Inductor's schedules are ordered by `improve`, and products do not wait; None for no effect."""
    if improve is None:
        yield
        return
    from torch._inductor import memory

    original = getattr(memory, "reorder_for_peak_memory", None)
    with contextlib.ExitStack() as stack:
        if original is not None and hasattr(memory, "get_freeable_input_buf"):
            stack.enter_context(
                mock.patch.object(memory, "reorder_for_peak_memory", _reordering(original, memory, improve))
            )
        stack.enter_context(_freed_at_once())
        stack.enter_context(kept_apart())
        for entry in _sums_of_products():
            stack.enter_context(mock.patch.object(entry, "extra_check", _unless_it_waits(entry.extra_check)))
        yield


# ---- the order --------------------------------------------------------------------------------------------------


def _reordering(original: Callable[..., Any], memory: Any, improve: Improve) -> Callable[..., Any]:
    def reorder(
        nodes: Any, name_to_buf: Any, name_to_fused_node: Any, graph_inputs: Any, graph_outputs: Any, *more: Any,
        **others: Any,
    ) -> Any:  # fmt: skip
        found = original(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, *more, **others)
        if any(_is_transfer(node) for node in nodes):
            found = list(nodes)
        inputs = memory.get_freeable_input_buf(found, graph_inputs)
        try:
            kernels = _kernels(found, inputs, graph_outputs)
        except AttributeError as error:  # another torch describes its schedule otherwise
            log.debug("Inductor's order of kernels stays as it is: %s", error)
            return found
        number = {node: i for i, node in enumerate(found)}
        return [found[i] for i in improve(*kernels, [number[node] for node in nodes])]

    return reorder


def _kernels(
    nodes: Sequence[Any], inputs: dict[str, Any], outputs: Any
) -> tuple[list[frozenset[int]], list[ScheduledBuffer], list[bool]]:
    """A schedule in numbers, from what Inductor noted when it planned for memory."""
    number = {node: i for i, node in enumerate(nodes)}
    before = [frozenset(number[p] for p in node.mpi_node.pred_nodes if p in number) for node in nodes]
    before = held_in_place(before, [i for i, node in enumerate(nodes) if _is_transfer(node)])
    fuses = [not node.is_extern() and not node.is_template() for node in nodes]

    views = _views(nodes)

    def described(buffer: Any, producer: int, returned: bool) -> ScheduledBuffer:
        info = buffer.mpi_buffer
        behind = views.get(buffer.get_name(), [])
        reading = dict.fromkeys(u for b in (buffer, *behind) for u in b.mpi_buffer.succ_nodes)
        users = tuple(number[u] for u in reading if u in number and number[u] != producer)
        returned = returned or any(b.get_name() in outputs for b in behind)
        inner = producer >= 0 and fuses[producer] and not users and not returned  # never leaves its kernel
        made = info.size_free if producer < 0 else info.size_alloc
        return ScheduledBuffer(
            0 if inner else int(made), 0 if inner else int(info.size_free), producer, users, returned
        )

    buffers = [described(buffer, -1, name in outputs) for name, buffer in inputs.items()]
    inside = {view.get_name() for some in views.values() for view in some}
    for i, node in enumerate(nodes):
        made = [buffer for buffer in node.get_outputs() if buffer.get_name() not in inside]
        buffers += [described(buffer, i, buffer.get_name() in outputs) for buffer in made]
    return before, buffers, fuses


def held_in_place(before: Sequence[frozenset[int]], fixed: Sequence[int]) -> list[frozenset[int]]:
    """What must precede each kernel where those at the places `fixed` stay where they are among all others: copies to
    the host and back begin and end where the plan has them, not where memory is shortest."""
    found, last = list(before), -1
    for place in (*fixed, len(before)):
        for kernel in range(last + 1, place):
            found[kernel] |= {last} if last >= 0 else set()
        if place < len(before):
            found[place] |= set(range(max(last, 0), place))
        last = place
    return found


def _is_transfer(node: Any) -> bool:
    """Whether a kernel begins or ends a copy to the host or back."""
    return getattr(getattr(node, "node", None), "op_overload", None) in OPERATORS


def _views(nodes: Sequence[Any]) -> dict[str, list[Any]]:
    """By the name of each buffer: those that operators make which Inductor calls, and that are parts of it."""
    later = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
    base: dict[str, str] = {}
    found: dict[str, list[Any]] = {}
    for node in nodes:
        for buffer in node.get_outputs():
            of = buffer.get_aliases()
            if of and of[0] not in later:  # parts of a `cat` are made before it
                name = base.get(of[0], of[0])
                base[buffer.get_name()] = name
                found.setdefault(name, []).append(buffer)
            later.discard(buffer.get_name())
    return found


@contextlib.contextmanager
def _freed_at_once() -> Iterator[None]:
    """Inside, a buffer is reused by the kernel behind its last use or released: Inductor keeps one for later kernels
    where its estimate of the peak allows that, and it estimates too much where kernels write over their inputs."""
    from torch._inductor.codegen import wrapper

    line = getattr(wrapper, "AllocateLine", None)
    if line is None or not hasattr(line, "should_reuse_buffer"):
        yield
        return
    original = line.should_reuse_buffer

    def at_once(self: Any, free_line: Any, size: int) -> bool:
        freed: Any = getattr(free_line, "scheduler_node_index", None)
        now: Any = getattr(self, "scheduler_node_index", None)
        if None not in (freed, now) and freed + 1 != now and not getattr(self, "comm_buffer", False):
            return False
        return bool(original(self, free_line, size))

    with mock.patch.object(line, "should_reuse_buffer", at_once):
        yield


# ---- products and sums ------------------------------------------------------------------------------------------


def _sums_of_products() -> list[Any]:
    """The patterns that fuse a product with the sum that reads it."""
    from torch._inductor.fx_passes import post_grad

    check = getattr(post_grad, "is_valid_addmm_fusion", None)
    tables = [table.patterns for table in getattr(post_grad, "pass_patterns", ()) if hasattr(table, "patterns")]
    entries = {id(e): e for table in tables for some in table.values() for e in some if e.extra_check is check}
    return list(entries.values()) if check is not None else []


def _unless_it_waits(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A fused product runs where the sum is: what it reads is held until then."""

    def check(match: Any) -> bool:
        return not _waits(match.nodes, match.output_node(), match.kwargs.get("inp")) and original(match)

    return check


def _waits(nodes: Sequence[fx.Node], output: fx.Node, other: Any) -> bool:
    """Whether the other term of the sum `output` is computed after the product."""
    product = next((n for n in nodes if n.target is torch.ops.aten.mm.default), None)
    while isinstance(other, fx.Node) and _is_view(other):
        other = other.args[0]
    if product is None or not isinstance(other, fx.Node):
        return False
    behind = product.next
    while behind.op != "root":
        if behind is other:
            return True
        if behind is output:
            return False
        behind = behind.next
    return False


def _is_view(node: fx.Node) -> bool:
    returns: Any = getattr(getattr(node.target, "_schema", None), "returns", ())
    return bool(returns) and returns[0].alias_info is not None and bool(node.args)
