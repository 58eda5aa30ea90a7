"""The bytes that Inductor's own kernels touch, read off its schedule: the reference for the fusion model.

Of each kernel: every buffer that it reads or writes and that lives outside it, once, and of that buffer the part that
its index expressions reach. Inductor's own `count_bytes` differs in two ways: it takes the whole of a table for a
gather, and the whole of a buffer for a matmul on a slice of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from optpass.backend import compat


@dataclass(frozen=True)
class KernelBytes:
    """One kernel that Inductor generates or calls: its phase, name in the schedule, bytes read and written."""

    phase: str
    name: str
    bytes: int


@contextmanager
def recorded() -> Iterator[list[KernelBytes]]:
    """Collects the kernels of every graph that Inductor compiles inside the block. Not for several threads.

    Inductor's caches are off meanwhile: a graph that a cache answers has no schedule to read.
    """
    scheduler = compat.scheduler_class()
    original = scheduler.codegen
    found: list[KernelBytes] = []

    def codegen(self: Any, *args: Any, **kwargs: Any) -> Any:
        phase = "backward" if compat.current_graph_is_backward() else "forward"
        for node in self.nodes:
            size = _node_bytes(self, node)
            if size:
                found.append(KernelBytes(phase, node.get_name(), size))
        return original(self, *args, **kwargs)

    scheduler.codegen = codegen
    try:
        with compat.inductor_config().patch(force_disable_caches=True):
            yield found
    finally:
        scheduler.codegen = original


def _node_bytes(scheduler: Any, node: Any) -> int:
    kind = type(node).__name__
    if kind.startswith("Nop"):
        return 0
    if kind.startswith("Extern"):
        return _extern_bytes(scheduler, node)
    members = list(node.get_nodes())
    inside = {name for member in members for name in _temporaries(scheduler, member, members)}
    touched: dict[str, dict[Any, int]] = {}
    for member in members:
        for dep in (*member.read_writes.reads, *member.read_writes.writes):
            if dep.name not in inside:
                touched.setdefault(dep.name, {})[_key(dep)] = _dep_elements(dep, member)
    total = 0
    for name, parts in touched.items():
        layout = compat.buffer_layout(name)
        if layout is not None:
            elements, itemsize = layout
            total += itemsize * min(elements, sum(parts.values()))
    return total


def _temporaries(scheduler: Any, member: Any, members: list[Any]) -> list[str]:
    """Buffers that `member` writes and nobody outside the kernel uses: they need no memory."""
    if len(members) < 2:
        return []
    names = []
    for buffer in member.get_outputs():
        users = {id(user.node) for user in scheduler.name_to_buf[buffer.get_name()].users}
        if users <= {id(m) for m in members}:
            names.append(buffer.get_name())
    return names


def _key(dep: Any) -> Any:
    return (dep.index, dep.size) if hasattr(dep, "var_names") else None


def _dep_elements(dep: Any, member: Any) -> int:
    """Elements that an access reaches: the product of the loops that its index uses; all loops for a gather."""
    if not hasattr(dep, "var_names"):  # a StarDep: the whole buffer, which the caller caps it at
        return 1 << 62
    names = {str(symbol) for symbol in dep.index.free_symbols}
    indirect = any(name.startswith(("indirect", "tmp")) for name in names)
    used = [
        compat.symbol_hint(size)
        for name, size in zip(dep.var_names, dep.size, strict=True)
        if indirect or str(name) in names
    ]
    if indirect:
        return math.prod(compat.symbol_hint(s) for group in member.get_ranges() for s in group)
    return math.prod(used)


def _extern_bytes(scheduler: Any, node: Any) -> int:
    """Inputs by the layout of the view that is passed, outputs whole."""
    if type(node.node).__name__ == "MultiOutput":
        return 0
    total = 0
    for operand in compat.extern_inputs(node.node):
        total += operand
    for buffer in node.get_outputs():
        total += _output_bytes(scheduler, buffer)
    return total


def _output_bytes(scheduler: Any, buffer: Any) -> int:
    layout = compat.buffer_layout(buffer.get_name())
    if layout is not None:
        return layout[0] * layout[1]
    total = 0
    for user in scheduler.name_to_buf[buffer.get_name()].users:
        inner = getattr(user.node, "node", None)
        if type(inner).__name__ == "MultiOutput":
            for result in user.node.get_outputs():
                shape = compat.buffer_layout(result.get_name())
                total += shape[0] * shape[1] if shape else 0
    return total
