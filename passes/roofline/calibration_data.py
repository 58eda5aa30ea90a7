"""What a calibration of this processor found: plain figures, their JSON, and the two shapes of curve they are kept as.

Measuring is in `calibration_probes` and `calibration_compiled`, caching in `calibration`, use in `cpu_model`. Nothing
here may import torch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

#: Raised when the meaning of a field or the way it is measured changes: older files are measured anew.
VERSION = 1

#: The columns of one register tile: below this many, BLAS kernels run their remainder code.
NARROW = 16


@dataclass(frozen=True)
class GemmFit:
    """Rate of matrix products [M, K] x [K, N] as a function of their sizes.

    FLOP/s = peak * M/(M + m_half) * N/(N + n_half) * K/(K + k_half): each extent pays for the part of a tile, or of
    a loop's start and end, that it does not fill (Hockney's n_1/2, "The Science of Computer Benchmarking", SIAM 1996).
    Where 2 <= N < 16 the rate is also multiplied by `narrow`, fitted on such products.

    Attributes:
        peak: FLOP/s of a product that is large in every extent, all threads together.
        m_half, n_half, k_half: extents at which half of the peak is lost.
        call_s: seconds that a call costs besides.
        narrow: factor for products of few columns.
        n_tile: columns of a register tile; 1 where none was found.
    """

    peak: float
    m_half: float
    n_half: float
    k_half: float
    call_s: float
    narrow: float = 1.0
    n_tile: int = 1

    def rate(self, m: float, n: float, k: float) -> float:
        """FLOP/s that one product of these sizes runs at, the call aside."""
        part = m / (m + self.m_half) * n / (n + self.n_half) * k / (k + self.k_half)
        if n > 1:  # products of one column are not tiled: they are bound by memory
            part *= n / (math.ceil(n / self.n_tile) * self.n_tile)
        return self.peak * part * (self.narrow if 1 < n < NARROW else 1.0)


@dataclass(frozen=True)
class Curve:
    """A positive quantity over a positive size, at points in rising order; interpolated in logarithms."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, size: float) -> float:
        """The value at `size`; beyond the ends, the value at the end."""
        if size <= self.sizes[0]:
            return self.values[0]
        if size >= self.sizes[-1]:
            return self.values[-1]
        right = bisect.bisect_right(self.sizes, size)
        x0, x1 = math.log(self.sizes[right - 1]), math.log(self.sizes[right])
        part = (math.log(size) - x0) / (x1 - x0)
        return math.exp((1 - part) * math.log(self.values[right - 1]) + part * math.log(self.values[right]))


@dataclass(frozen=True)
class CpuCalibration:
    """Figures of one processor under one torch version and thread count. Every time is with all threads at work.

    Attributes:
        cpu, cores, threads, torch: what was measured: model name, logical processors, torch's threads, torch version.
        gemm: by dtype, matrix products.
        conv: forward convolutions in channels-last float32, as products of M = batch * output positions,
            N = output channels of a group and K = input channels of a group * taps.
        conv_backward: rate of a convolution's gradients over that of the forward.
        attention: FLOP/s of the fused attention kernel by 'forward' and 'backward'.
        bandwidth: bytes read and written per second by a copy, over the bytes that it touches.
        element_s: seconds per element and operation in a compiled loop, by class of operation
            (`calibration_compiled.CLASSES`), loads and stores aside; and of library kernels `sort` per comparison,
            `bag` per gradient element of an embedding bag, `unroll` per element of im2col.
        kernel_s: one call of a compiled kernel or a library routine from the compiled wrapper.
        graph_s: one call of a compiled graph besides its kernels: guards and wrapper.
        backward_s: what training adds to that: autograd's bookkeeping and the call of the backward graph.
        region_s: entering and leaving a parallel loop.
        fault_s: per byte of memory that is touched for the first time after the system handed it out.
        compiled: False where no compiler was found and eager kernels stood in for compiled loops.
    """

    cpu: str
    cores: int
    threads: int
    torch: str
    gemm: Mapping[str, GemmFit]
    conv: GemmFit
    conv_backward: float
    attention: Mapping[str, float]
    bandwidth: Curve
    element_s: Mapping[str, float]
    kernel_s: float
    graph_s: float
    backward_s: float
    region_s: float
    fault_s: float
    compiled: bool = True
    version: int = VERSION

    def fingerprint(self) -> str:
        """SHA-256 over every figure; the same in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """JSON text that `from_json` takes back."""
        return json.dumps(asdict(self), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CpuCalibration:
        """The calibration that `to_json` wrote.

        Raises:
            ValueError: not JSON, another version, a field missing or unknown, or an impossible figure.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("version") != VERSION:
                raise ValueError(f"not a calibration of version {VERSION}")
            if {f.name for f in fields(cls)} != data.keys():
                raise ValueError("its fields are not those of a calibration")
            data["gemm"] = {dtype: GemmFit(**fit) for dtype, fit in data["gemm"].items()}
            data["conv"] = GemmFit(**data["conv"])
            curve = data["bandwidth"]
            data["bandwidth"] = Curve(tuple(curve["sizes"]), tuple(curve["values"]))
            found = cls(**data)
            found.check()
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a calibration cannot be read: {error}") from error
        return found

    def check(self) -> None:
        """Raises ValueError unless every figure is finite and in its range."""
        positive: list[Any] = [self.kernel_s, self.graph_s, self.backward_s, self.conv_backward]
        positive += self.attention.values()
        positive += [*self.bandwidth.sizes, *self.bandwidth.values]
        for fit in (*self.gemm.values(), self.conv):
            positive += [fit.peak, fit.narrow, fit.n_tile]
        rest: list[Any] = [self.region_s, self.fault_s, *self.element_s.values()]
        for fit in (*self.gemm.values(), self.conv):
            rest += [fit.m_half, fit.n_half, fit.k_half, fit.call_s]
        if not all(_number(v) and v > 0 for v in positive) or not all(_number(v) and v >= 0 for v in rest):
            raise ValueError("a calibration holds a figure that is not a positive number")
        rising = all(a < b for a, b in zip(self.bandwidth.sizes, self.bandwidth.sizes[1:], strict=False))
        if "float32" not in self.gemm or not rising or len(self.bandwidth.sizes) != len(self.bandwidth.values):
            raise ValueError("a calibration lacks float32 products, or its bandwidth curve is not in order")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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

    def search(tile: int) -> tuple[float, GemmFit]:
        def loss(at: Sequence[float]) -> float:
            fit = _fit(at, tile)
            total = sum(_huber(math.log(gemm_seconds(fit, *_sizes(s), bandwidth) / s.seconds)) for s in wide)
            # Extents that no sample bears on drift without this pull towards where the search began.
            return total / len(wide) + 1e-3 * sum((a - b) ** 2 for a, b in zip(at[1:], point[1:], strict=True))

        value, at = _pattern_search(loss, point)
        return value, _fit(at, tile)

    found = min((search(tile) for tile in (tiles if start is None else (begin.n_tile,))), key=lambda pair: pair[0])[1]
    narrow = [s for s in samples if 1 < s.n < NARROW]
    if not narrow or narrow == wide:
        return found
    ratios = [gemm_seconds(found, *_sizes(s), bandwidth) / s.seconds for s in narrow]
    factor = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    return replace(found, narrow=min(1.0, factor))


def gemm_seconds(fit: GemmFit, m: float, n: float, k: float, batch: float, moved: float, bandwidth: Curve) -> float:
    """Seconds of `batch` products in one call: the slower of arithmetic and memory, and the call."""
    arithmetic = 2.0 * m * n * k * batch / fit.rate(m, n, k)
    return max(arithmetic, moved / bandwidth.at(moved)) + fit.call_s


def _sizes(sample: GemmSample) -> tuple[int, int, int, int, int]:
    return sample.m, sample.n, sample.k, sample.batch, sample.bytes


def _huber(error: float, knee: float = 0.2) -> float:
    size = abs(error)
    return size * size / 2 if size < knee else knee * (size - knee / 2)


def _flops(sample: GemmSample) -> float:
    return 2.0 * sample.m * sample.n * sample.k * sample.batch


def _fit(at: Sequence[float], tile: int) -> GemmFit:
    # Bounds keep a noisy sample from buying a nonsensical parameter.
    peak, m_half, n_half, k_half, call_s = (math.exp(min(v, 60.0)) for v in at)
    return GemmFit(peak, min(m_half, 512.0), min(n_half, 512.0), min(k_half, 512.0), min(call_s, 1e-3), 1.0, tile)


def _pattern_search(
    loss: Callable[[Sequence[float]], float], start: Sequence[float]
) -> tuple[float, list[float]]:
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
