"""PyTorch's own `activation_memory_budget`, a ratio of saved bytes, for the benchmarks that measure it.

Nothing that optpass compiles uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def activation_memory_budget(ratio: float) -> Iterator[None]:
    """Inside, AOTAutograd's min-cut partitioner saves about `ratio` (0 to 1) of the bytes it would."""
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=ratio):  # type: ignore[attr-defined, unused-ignore]
        yield
