"""Inductor's schedule while it lowers a graph, for `kernel_bytes`."""

from __future__ import annotations

import math
from typing import Any


def scheduler_class() -> Any:
    """`torch._inductor.scheduler.Scheduler`."""
    from torch._inductor.scheduler import Scheduler

    return Scheduler


def current_graph_is_backward() -> bool:
    """Whether Inductor is lowering a backward graph."""
    from torch._inductor.virtualized import V

    return bool(V.graph.is_backward)


def symbol_hint(expression: Any) -> int:
    """An int for one of Inductor's size expressions."""
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint  # the name before torch 2.12
    return int(hint(expression, fallback=1))


def buffer_layout(name: str) -> tuple[int, int] | None:
    """(elements, bytes of an element) of a buffer or input of the graph being lowered; None if it has no size."""
    from torch._inductor.virtualized import V

    graph = V.graph
    buffer = graph.name_to_buffer.get(name) or graph.graph_inputs.get(name)
    return _ir_layout(buffer)


def extern_inputs(node: Any) -> list[int]:
    """Bytes of each distinct input of an extern kernel, as the view that is passed."""
    found: dict[tuple[Any, ...], int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
            return
        layout = _ir_layout(value)
        if layout is not None:
            offset = str(getattr(getattr(value, "layout", None), "offset", 0))
            found[value.get_name(), offset, layout] = layout[0] * layout[1]

    visit(list(node.inputs))
    return list(found.values())


def _ir_layout(buffer: Any) -> tuple[int, int] | None:
    if buffer is None or not hasattr(buffer, "get_size"):
        return None
    try:
        sizes, dtype = buffer.get_size(), buffer.get_dtype()
    except (NotImplementedError, AttributeError, AssertionError):
        return None  # a buffer without a layout of its own, such as the tuple of a multi-output kernel
    return math.prod(symbol_hint(size) for size in sizes), dtype.itemsize
