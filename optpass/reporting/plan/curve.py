"""Which points of a curve of peaks and slowdowns are written down or shown."""

from __future__ import annotations

from collections.abc import Sequence

from optpass.reporting.plan.model import ParetoPoint


def evenly(points: Sequence[ParetoPoint], count: int) -> list[ParetoPoint]:
    """At most `count` of the points: the first, the last, and between them those nearest to evenly spaced peaks.

    Args:
        points: by falling peak.
        count: at least 2.
    """
    if len(points) <= count:
        return list(points)
    high, low = points[0].peak_bytes, points[-1].peak_bytes
    peaks = [high + (low - high) * i / (count - 1) for i in range(count)]
    nearest = {min(range(len(points)), key=lambda i: (abs(points[i].peak_bytes - peak), i)) for peak in peaks}
    return [points[i] for i in sorted(nearest | {0, len(points) - 1})]
