"""What a calibration of this processor found: plain figures, their JSON, and the two shapes of curve they are kept as.

`calibration_library` and `calibration_compiled` measure them, `calibration_fit` fits them, `calibration` keeps them and
`cpu_model` reads them. Nothing here may import torch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

#: Raised when the meaning of a field or the way it is measured changes: older files are measured anew.
VERSION = 4

#: The columns of one register tile: below this many, BLAS kernels run their remainder code.
NARROW = 16
#: Elements of a vector in float32, at most; row lengths that are no multiple end in a loop over single elements.
VECTOR = 16
#: Entry of a parallel loop where it could not be measured: fork and join of an OpenMP team that is awake (Bull et al.,
#: "A microbenchmark suite for OpenMP 3.0", IWOMP 2011, find 1 to 10 microseconds).
REGION_S = 3e-6
#: Library kernels that run on one thread.
SERIAL = ("sort", "bag")
#: Queries that ATen's fused attention takes at a time, for all but long sequences (FlashAttentionKernel.cpp).
ATTENTION_BLOCK = 32


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
        n_rest: columns that a last tile costs in addition where it ends within a vector (N no multiple of 8).
    """

    peak: float
    m_half: float
    n_half: float
    k_half: float
    call_s: float
    narrow: float = 1.0
    n_tile: int = 1
    n_rest: int = 0

    def rate(self, m: float, n: float, k: float) -> float:
        """FLOP/s that one product of these sizes runs at, the call aside."""
        part = m / (m + self.m_half) * n / (n + self.n_half) * k / (k + self.k_half)
        if n > 1:  # products of one column are not tiled: they are bound by memory
            part *= n / (math.ceil(n / self.n_tile) * self.n_tile + (self.n_rest if n % 8 else 0))
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
        cpu, instructions, cores, threads, torch: what was measured: model name and `processor.instructions`, logical
            processors, torch's threads, torch version.
        gemm: by dtype, matrix products.
        conv: forward convolutions in channels-last float32, as products of M = batch * output positions,
            N = output channels of a group and K = input channels of a group * taps.
        conv_backward: rate of a convolution's gradients over that of the forward.
        attention: seconds per score of the fused attention kernel beside its products, by 'forward' and 'backward';
            with `_tail`, in addition for those scores of a row that do not fill a vector.
        bandwidth: bytes read and written per second by a copy, over the bytes that it touches.
        element_s: seconds per element and operation in a compiled loop, by class of operation
            (`calibration_compiled.CLASSES`), loads and stores aside; and of library kernels `sort` per comparison,
            `bag` per gradient element of an embedding bag, `unroll` per element of im2col.
        kernel_s: one call of a compiled kernel or a library routine from the compiled wrapper.
        graph_s: one call of a compiled graph besides its kernels: guards and wrapper.
        backward_s: what training adds to that: autograd's bookkeeping and the call of the backward graph.
        region_s: entering and leaving a parallel loop.
        cold_s: per byte of a product's second operand that comes from memory, beyond the product itself: libraries
            copy it into blocks first, which does not overlap with arithmetic.
        fault_s: per byte of memory that is touched for the first time after the system handed it out.
        estimated: measured on one thread, and scaled to `threads`.
        compiled: False where no compiler was found and eager kernels stood in for compiled loops.
    """

    cpu: str
    instructions: str
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
    cold_s: float
    fault_s: float
    compiled: bool = True
    estimated: bool = False
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
        others: list[Any] = [self.region_s, self.cold_s, self.fault_s, *self.element_s.values()]
        for fit in (*self.gemm.values(), self.conv):
            others += [fit.n_rest, fit.m_half, fit.n_half, fit.k_half, fit.call_s]
        if not all(_number(v) and v > 0 for v in positive) or not all(_number(v) and v >= 0 for v in others):
            raise ValueError("a calibration holds a figure that is not a positive number")
        rising = all(a < b for a, b in zip(self.bandwidth.sizes, self.bandwidth.sizes[1:], strict=False))
        if "float32" not in self.gemm or not rising or len(self.bandwidth.sizes) != len(self.bandwidth.values):
            raise ValueError("a calibration lacks float32 products, or its bandwidth curve is not in order")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def scaled(one: CpuCalibration, threads: int) -> CpuCalibration:
    """What `threads` threads would do by a calibration of one: rates in proportion, but for memory beyond the caches.

    A parallel loop is taken to cost `REGION_S` to enter.
    """
    if threads == 1:
        return one
    shared = one.bandwidth.values[-1]  # one thread can nearly fill the memory's own bus on small machines
    values = tuple(max(shared, v * threads) if v > 1.5 * shared else v for v in one.bandwidth.values)
    return replace(
        one, threads=threads, estimated=True, region_s=REGION_S, bandwidth=Curve(one.bandwidth.sizes, values),
        gemm={dtype: replace(fit, peak=fit.peak * threads) for dtype, fit in one.gemm.items()},
        conv=replace(one.conv, peak=one.conv.peak * threads),
        attention={way: seconds / threads for way, seconds in one.attention.items()},
        element_s={name: seconds / (1 if name in SERIAL else threads) for name, seconds in one.element_s.items()},
    )  # fmt: skip


def gemm_seconds(fit: GemmFit, m: float, n: float, k: float, batch: float, moved: float, bandwidth: Curve) -> float:
    """Seconds of `batch` products in one call: the slower of arithmetic and memory, and the call."""
    arithmetic = 2.0 * m * n * k * batch / fit.rate(m, n, k)
    return max(arithmetic, moved / bandwidth.at(moved)) + fit.call_s


def attention_products(
    flops: float, length: float, width: float, rate: Callable[[float, float, float], float]
) -> float:
    """Seconds of the two products of fused attention, whose blocks are `ATTENTION_BLOCK` queries high.

    Args:
        flops: of both products, all heads together.
        length, width: number of keys, and width of a head.
        rate: FLOP/s of a product of M, N, K.
    """
    return flops / 2 * (1 / rate(ATTENTION_BLOCK, length, width) + 1 / rate(ATTENTION_BLOCK, width, length))
