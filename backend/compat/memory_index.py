"""What Inductor finds out about the indices of its loops, kept from one lowering to the next.

Inductor asks of each index by how much it grows along a loop, which sympy takes long to say, and remembers 128 answers,
fewer than one graph needs. The plans of one graph are lowered one after another and ask the same; the answers depend on
nothing but the index.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

#: Functions of `torch._inductor.sizevars` that are pure, and cached there with a small cache.
_PURE = ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range")


@contextlib.contextmanager
def indices_kept() -> Iterator[None]:
    """Inside, no answer is asked for twice; they are let go of at the end."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    with contextlib.ExitStack() as stack:
        for name in _PURE:
            small = getattr(sizevars, name, None)
            function = getattr(small, "__wrapped__", None)
            if function is None or not hasattr(small, "cache_info"):  # another torch has it otherwise
                continue
            large = functools.lru_cache(maxsize=None)(function)
            for module in (sizevars, cpp):
                if getattr(module, name, None) is small:
                    stack.enter_context(mock.patch.object(module, name, large))
        yield
