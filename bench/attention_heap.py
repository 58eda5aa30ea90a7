"""The C library's heap while attention is timed: buffers kept, or each large one mapped anew (`gate.heap` says when).

Which of both a benchmark meets depends on what it did before, so neither is left to chance: everything is measured with
buffers that are kept, and what faults add is measured in a process where every large buffer is mapped.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping

#: For a child process: what is larger than 1 MiB is mapped, and returned when it is freed.
MAPPED: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h


def keep() -> bool:
    """From now on this process maps no buffer and returns none; False where the C library is not glibc."""
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if not (hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
