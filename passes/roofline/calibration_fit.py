"""Fits the rate of matrix products to measured ones. Nothing here measures, and nothing here may import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from optpass.passes.roofline.calibration_data import NARROW, Curve, GemmFit, gemm_seconds

#: Values of `GemmFit.n_rest` that are tried.
RESTS = (0, 8)


@dataclass(frozen=True)
class GemmSample:
    """One measured product (or convolution seen as one): sizes, bytes it touches, and seconds it took."""

    m: int
    n: int
    k: int
    batch: int
    bytes: int
    seconds: float


def fit_gemm(
    samples: Sequence[GemmSample],
    bandwidth: Curve,
    start: GemmFit | None = None,
    tiles: Sequence[int] = (1, 8, 16, 32),
) -> GemmFit:
    """The `GemmFit` with the least mean Huber loss in log(predicted / measured) over the samples.

    A pattern search over the logarithms of the five parameters (Hooke and Jeeves, JACM 8(2), 1961): few samples, and
    no library needed. Huber's loss, because a sample that another process disturbed is too slow by any factor.
    `narrow` is fitted afterwards.

    Args:
        samples: at least one; those of 2 to 15 columns count for `narrow` only.
        bandwidth: what holds products that move more than they compute.
        start: where to begin, for example another dtype's fit; its tile is kept.
        tiles: columns of a register tile to try.
    """
    wide = [s for s in samples if not 1 < s.n < NARROW] or list(samples)
    peak = max(_flops(s) / s.seconds for s in wide)
    begin = start or GemmFit(peak, 2.0, 4.0, 4.0, 1e-6)
    point = [math.log(v) for v in (peak, begin.m_half, begin.n_half, begin.k_half, begin.call_s)]

    def search(tile: int, rest: int) -> tuple[float, GemmFit]:
        def loss(at: Sequence[float]) -> float:
            fit = _fit(at, tile, rest)
            total = sum(_huber(math.log(gemm_seconds(fit, *_sizes(s), bandwidth) / s.seconds)) for s in wide)
            # Extents that no sample bears on drift without this pull towards where the search began.
            return total / len(wide) + 1e-3 * sum((a - b) ** 2 for a, b in zip(at[1:], point[1:], strict=True))

        value, at = _pattern_search(loss, point)
        return value, _fit(at, tile, rest)

    steps = [(tile, rest) for tile in tiles for rest in (RESTS if tile > 1 else (0,))]
    if start is not None:
        steps = [(start.n_tile, start.n_rest)]
    found = min((search(*step) for step in steps), key=lambda pair: pair[0])[1]
    narrow = [s for s in samples if 1 < s.n < NARROW]
    if not narrow or narrow == wide:
        return found
    ratios = [gemm_seconds(found, *_sizes(s), bandwidth) / s.seconds for s in narrow]
    factor = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    return replace(found, narrow=min(1.0, factor))


def _sizes(sample: GemmSample) -> tuple[int, int, int, int, int]:
    return sample.m, sample.n, sample.k, sample.batch, sample.bytes


def _huber(error: float, knee: float = 0.2) -> float:
    size = abs(error)
    return size * size / 2 if size < knee else knee * (size - knee / 2)


def _flops(sample: GemmSample) -> float:
    return 2.0 * sample.m * sample.n * sample.k * sample.batch


def _fit(at: Sequence[float], tile: int, rest: int) -> GemmFit:
    # Bounds keep a noisy sample from buying a nonsensical parameter.
    peak, m_half, n_half, k_half, call_s = (math.exp(min(v, 60.0)) for v in at)
    return GemmFit(peak, min(m_half, 512.0), min(n_half, 512.0), min(k_half, 512.0), min(call_s, 1e-3), 1.0, tile, rest)


def _pattern_search(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> tuple[float, list[float]]:
    """Least `loss` near `start`: step along one axis at a time, with shorter steps once none helps."""
    point, steps = list(start), [0.4] * len(start)
    best = loss(point)
    for _ in range(200):
        for axis in range(len(point)):
            for sign in (1.0, -1.0):
                trial = list(point)
                trial[axis] += sign * steps[axis]
                value = loss(trial)
                if value < best - 1e-9:
                    point, best = trial, value
                    break
            else:
                steps[axis] *= 0.6
        if max(steps) < 0.01:
            break
    return best, point
