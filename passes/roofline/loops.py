"""The loop nest of a kernel: in which order its dimensions run, and which of them run as one.

Models of `torch._inductor.scheduler.pick_loop_order` and `simplify_loops`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


def pick_order(strides: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Dimensions from the outermost to the innermost, so that most accesses advance by small steps."""

    def compare(a: int, b: int) -> int:
        if sizes[a] == 1 or sizes[b] == 1:
            return (sizes[a] == 1) - (sizes[b] == 1)
        a_first = sum(s[b] == 0 or abs(s[a]) < abs(s[b]) for s in strides)
        b_first = sum(s[a] == 0 or abs(s[b]) < abs(s[a]) for s in strides)
        if a_first != b_first:
            return -1 if a_first > b_first else 1
        return (b > a) - (b < a)

    innermost_first = sorted(range(len(sizes) - 1, -1, -1), key=functools.cmp_to_key(compare))
    return list(reversed(innermost_first))
