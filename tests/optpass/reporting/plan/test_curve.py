"""What is shown of a curve: spaced by peaks, however many plans crowd at one of them."""

from __future__ import annotations

import pytest

from optpass.reporting.plan.curve import evenly
from optpass.reporting.plan.model import ParetoPoint


def curve(*peaks: int) -> list[ParetoPoint]:
    return [ParetoPoint(peak_bytes=peak, slowdown=1 + i / 100) for i, peak in enumerate(peaks)]


@pytest.mark.parametrize("peaks", [(), (5,), (9, 5), (9, 8, 5)])
def test_few_points_are_all_shown(peaks: tuple[int, ...]) -> None:
    assert evenly(curve(*peaks), 3) == curve(*peaks)


def test_a_crowd_is_thinned_and_a_lone_point_kept() -> None:
    shown = evenly(curve(*range(1000, 900, -1), 500, 100), 5)
    assert [point.peak_bytes for point in shown] == [1000, 901, 500, 100]


def test_never_more_than_asked() -> None:
    points = curve(*range(5000, 1000, -7))
    shown = evenly(points, 20)
    assert len(shown) == 20
    assert shown[0] == points[0] and shown[-1] == points[-1]
    assert [p.peak_bytes for p in shown] == sorted({p.peak_bytes for p in shown}, reverse=True)
