"""Random numbers of compiled code as eager code draws them, so that runs with different graphs can be compared."""

from __future__ import annotations


def random_as_eager() -> None:
    """Have Inductor take random numbers from torch's generators. Without effect where torch has no such switch."""
    from torch._inductor import config

    if hasattr(config, "fallback_random"):
        config.fallback_random = True
