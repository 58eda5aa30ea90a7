"""Autocast: its state where a node was recorded, and left as it was behind a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

#: Kinds of devices whose autocast is followed.
KINDS = ("cpu", "cuda")


def state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Of each kind of device, whether autocast is on and the dtype that it casts to."""
    return tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in KINDS)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Autocast nodes of the graph come in pairs, but a graph may end inside one: leave the state as it was."""
    before = list(zip(KINDS, state(), strict=True))
    cache = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # a cached cast would be taken for the value that it was cast from
        yield
    finally:
        for kind, (enabled, dtype) in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
