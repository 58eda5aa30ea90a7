"""Telling SDPA which of its kernels to take, in the graph, as Dynamo writes `with sdpa_kernel(...)` of the user's own.

Only where the kernel chosen is not the one that SDPA takes by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.attention as attention
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

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
    if device == "cuda":
        _settle_order()
    before = attention._cur_sdpa_kernel_backends(with_priority=True)
    names = [backend.name for backend in before]
    first = known[kernel].backend
    _order(writer, [first, *(n for n in names if n != first)])
    try:
        return call()
    finally:
        _order(writer, names)


@functools.cache
def _settle_order() -> None:
    """Have torch set its own order of kernels, where it has not.

    It does so when it is first asked for a choice (`priority_order` in sdp_utils.cpp puts cuDNN first on Hopper and
    Blackwell), also where another order was set before that: the first one that we set would be lost, and what was read
    as the order to put back would not be torch's.
    """
    if torch.cuda.is_available():
        with _disable_current_modes(), torch.no_grad():
            q = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
            torch.ops.aten._fused_sdp_choice(q, q, q)


def _order(writer: Writer, names: list[str]) -> None:
    backends = [writer.call(attention._backend_from_string, name) for name in names]
    writer.call(attention._sdpa_kernel, backends, True)
