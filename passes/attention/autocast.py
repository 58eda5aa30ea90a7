"""Autocast: its state where a node was recorded, and calls under it whose operands keep their dtypes.

SDPA under autocast narrows its mask too: the lowest float32 is minus infinity in half precision, and a bias is rounded
that the written program adds in float32. What the program computed where autocast was off is not to be narrowed either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from optpass.passes.attention.site import Blocked

if TYPE_CHECKING:
    from optpass.passes.attention.emit import Writer
#: Kinds of devices whose autocast is followed.
_KINDS = ("cpu", "cuda")


def narrows(writer: Writer, device: str, *dtypes: torch.dtype) -> bool:
    """Whether autocast would cast operands of any of `dtypes` for `device` where `writer` writes."""
    states = dict(zip(_KINDS, writer.program.autocast.get(writer.at, ()), strict=False))
    on, to = states.get(device, (False, None))
    return bool(on) and any(dtype.is_floating_point and dtype != to for dtype in dtypes)


def without(writer: Writer, device: str, call: Callable[[], fx.Node]) -> fx.Node:
    """What `call` writes, between nodes that switch autocast off for `device` and on again, as Dynamo writes them."""
    enter = getattr(torch.amp.autocast_mode, "_enter_autocast", None)
    leave = getattr(torch.amp.autocast_mode, "_exit_autocast", None)
    if enter is None or leave is None:
        raise Blocked("it is wider than what autocast would make of it, and this torch cannot switch that off")
    mode: Any = writer.call(enter, device, None, False, None)
    try:
        return call()
    finally:
        done = writer.call(leave, mode)
        for node in (mode, done):
            del node.meta["example_value"]


def state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Of each kind of device, whether autocast is on and the dtype that it casts to."""
    return tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _KINDS)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Autocast nodes of the graph come in pairs, but a graph may end inside one: leave the state as it was."""
    before = list(zip(_KINDS, state(), strict=True))
    cache = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # a cached cast would be taken for the value that it was cast from
        yield
    finally:
        for kind, (enabled, dtype) in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
