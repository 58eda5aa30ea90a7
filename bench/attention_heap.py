"""The C library's heap while attention is timed: kept, or each large buffer mapped anew, as it is for a user.

A buffer that the allocator maps anew costs a page fault for every 4 KiB at every call. glibc maps what is larger than a
threshold that rises with what was freed before, up to 32 MiB: above that, every buffer of every call. Below, it depends
on all that the process did before, and one size is met both with and without faults. So nothing is measured in the
state that a benchmark happens to be in: buffers are kept, but where a user's program is known to map them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping

#: DEFAULT_MMAP_THRESHOLD_MAX of glibc (malloc/malloc.c) on 64-bit systems: a larger buffer is always mapped.
ALWAYS = 32 * 2**20
#: Of half precision, Inductor frees scores and weights together in a forward, and the top of the heap is returned with
#: them. In training they wait for the backward, and float32 is written over in place: their buffers are kept.
HALF_FORWARD = 16 * 2**20
#: For a child process: what is larger than 1 MiB is mapped, and returned when it is freed.
MAPPED: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h


def mapped(scores: float, itemsize: int, *, training: bool) -> bool:
    """Whether a buffer of so many scores is taken to be mapped at every call."""
    return scores * itemsize >= (ALWAYS if training or itemsize > 2 else HALF_FORWARD)


def keep() -> bool:
    """From now on this process maps no buffer and returns none; False where the C library is not glibc."""
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if not (hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def joined(kept: tuple[float, ...], faulting: tuple[float, ...], here: tuple[bool, ...]) -> tuple[float, ...]:
    """Of two measurements of the same sizes, the one that holds at each; the larger where faults were not met."""
    return tuple(max(a, b) if there else a for a, b, there in zip(kept, faulting, here, strict=True))
