"""Sizes to pad to, from sizes seen."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 4
_ROUND = 8  #: sizes are rounded up to a multiple of it where all are larger: matrix units want that


def buckets(lengths: Sequence[int], most: int = _MOST) -> list[int]:
    """At most `most` sizes to pad to, such that the sizes seen are padded by as little as possible in all.

    Args:
        lengths: sizes seen, in any order.
        most: how many boundaries are wanted at most; fewer are used for few sizes.

    Returns:
        Increasing boundaries; the last holds the largest size. Empty for no sizes.
    """
    sizes = sorted(set(lengths))
    if not sizes:
        return []
    step = _ROUND if sizes[0] >= _ROUND else 1
    tops = sorted({-(-size // step) * step for size in sizes})
    wanted = min(most, max(1, (len(sizes) + 1) // 2), len(tops))
    # best[k][i]: least padding of the sizes up to tops[i] with k boundaries, the last of them at tops[i]
    best: dict[int, tuple[float, list[int]]] = {
        i: (sum(top - size for size in sizes if size <= top), [top]) for i, top in enumerate(tops)
    }
    for _ in range(wanted - 1):
        best = {
            i: min(
                (best[i], *(_extended(best[j], tops[j], top, sizes) for j in range(i))),
                key=lambda option: (option[0], len(option[1])),
            )
            for i, top in enumerate(tops)
        }
    return best[len(tops) - 1][1]


def _extended(option: tuple[float, list[int]], below: int, top: int, sizes: Sequence[int]) -> tuple[float, list[int]]:
    padding, chosen = option
    return padding + sum(top - size for size in sizes if below < size <= top), [*chosen, top]
