"""Planning without Python's collector of cycles, whose every run walks all that torch has in memory.

Planning makes objects in the millions and few cycles. Nothing else here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, cycles are not collected; afterwards as before. Around parts that hold little when they end."""
    if not gc.isenabled():  # the outermost one turns it on again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
