"""Telling SDPA which of its kernels to take, in the graph, as Dynamo writes `with sdpa_kernel(...)` of the user's own.

Only where the kernel chosen is not the one that SDPA takes by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.attention as attention
from torch import fx

from optpass.passes.attention.targets import kernels
from optpass.passes.attention.write.emit import Writer


def available() -> bool:
    """Whether this torch has the functions that Dynamo's own nodes call."""
    return all(
        hasattr(attention, name) for name in ("_backend_from_string", "_sdpa_kernel", "_cur_sdpa_kernel_backends")
    )


def preferring(writer: Writer, device: str, kernel: str, call: Callable[[], fx.Node]) -> fx.Node:
    """What `call` writes, between nodes that put `kernel` before the other kernels and that put the order back.

    The others stay allowed: strides and sizes at run time can still rule the first one out.
    """
    known = kernels(device)
    before = attention._cur_sdpa_kernel_backends(with_priority=True)
    names = [backend.name for backend in before]
    first = known[kernel].backend
    _order(writer, [first, *(n for n in names if n != first)])
    try:
        return call()
    finally:
        _order(writer, names)


def _order(writer: Writer, names: list[str]) -> None:
    backends = [writer.call(attention._backend_from_string, name) for name in names]
    writer.call(attention._sdpa_kernel, backends, True)
