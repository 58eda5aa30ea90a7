"""Calls under autocast whose operands keep their dtypes.

SDPA under autocast narrows its mask too: the lowest float32 is minus infinity in half precision, and a bias is rounded
that the written program adds in float32. What the program computed where autocast was off is not to be narrowed either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from optpass.passes.attention.program.autocast import KINDS
from optpass.passes.attention.site import Blocked

if TYPE_CHECKING:
    from optpass.passes.attention.write.emit import Writer


def narrows(writer: Writer, device: str, *dtypes: torch.dtype) -> bool:
    """Whether autocast would cast operands of any of `dtypes` for `device` where `writer` writes."""
    states = dict(zip(KINDS, writer.program.autocast.get(writer.at, ()), strict=False))
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
