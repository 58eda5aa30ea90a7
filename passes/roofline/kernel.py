"""The unit of the fusion model: a kernel, what it reads and writes, and a value that no kernel has stored yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from optpass.passes.roofline.lowering import Role


@dataclass(slots=True)
class Read:
    """A read of buffer `buffer`: `bytes` touched, `order` the chain of layout changes it is read through."""

    buffer: int
    bytes: int
    order: tuple[object, ...] = ()


@dataclass(slots=True)
class Lazy:
    """A value that no kernel has stored yet: what it reads, and the ops that compute it."""

    reads: list[Read]
    ops: list[int]
    heavy: bool = False
    rank: int = 0
    view_of: int | None = None  # buffer that this is a plain view of


@dataclass(slots=True)
class Kernel:
    """A kernel before or after merging."""

    members: list[int]  # op indices
    reads: list[Read]
    writes: dict[int, int]  # buffer -> bytes
    role: Role
    outer: int  # iterations outside the reduction
    inner: int  # iterations of the reduction, 1 if none
    last: bool = True  # the reduction runs over the innermost dimensions
    first: int = 0
    position: int = 0
    size: int = 1
    predecessors: set[int] = field(default_factory=set)
    successors: set[int] = field(default_factory=set)


def merged(reads: Iterable[Read]) -> list[Read]:
    """One read per buffer and order."""
    found: dict[tuple[int, tuple[object, ...]], Read] = {}
    for read in reads:
        key = (read.buffer, read.order)
        if key not in found or found[key].bytes < read.bytes:
            found[key] = read
    return list(found.values())
