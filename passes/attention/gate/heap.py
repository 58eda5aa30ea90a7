"""When the C library maps a buffer anew at every call, and so a page fault is paid for every 4 KiB that is written.

glibc maps what is larger than a threshold, which rises to the size of what was mapped and freed before, up to 32 MiB:
above that, every buffer of every call is mapped. Below, it depends on all that the process did before: one size is met
with faults and without. What is said here is how programs were met, not what one process will do.
"""

from __future__ import annotations

from typing import Final

#: DEFAULT_MMAP_THRESHOLD_MAX of glibc (malloc/malloc.c) on 64-bit systems: a larger buffer is always mapped.
ALWAYS: Final = 32 * 2**20
#: Of half precision, Inductor frees scores and weights together in a forward, and the top of the heap is returned with
#: them: met in GPTs from this size on. In training they wait for the backward, and float32 is written over in place.
HALF_FORWARD: Final = 8 * 2**20


def mapped(scores: float, itemsize: int, *, training: bool) -> bool:
    """Whether a buffer of so many scores is taken to be mapped at every call."""
    return scores * itemsize >= (ALWAYS if training or itemsize > 2 else HALF_FORWARD)
