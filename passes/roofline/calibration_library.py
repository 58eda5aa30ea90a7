"""All probes of library kernels together, taken in rounds that lie apart in time, of which the best of each is kept.

The probes are in `calibration_probes`. Two rounds with other work in between, because a machine that is shared is
disturbed for seconds at a time: one process on the core of a thread makes every parallel loop wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optpass.passes.roofline import calibration_probes as probes
from optpass.passes.roofline.calibration_clock import Budget
from optpass.passes.roofline.calibration_data import Curve, GemmFit
from optpass.passes.roofline.calibration_fit import GemmSample, fit_gemm

DTYPES = ("float32", *probes.OTHER_DTYPES, "int8")


@dataclass(frozen=True)
class Library:
    """Raw figures of one round, seconds unless named otherwise.

    Attributes:
        copies: by bytes read and written.
        gemm: products by dtype; a dtype that cannot be multiplied here is absent.
        conv, gradients: forward convolutions, and (forward, gradients) of some.
        attention: forward and backward for each shape of `probes.ATTENTION`.
        cold, fresh, sort, bag, unroll: see the probes of those names.
    """

    copies: tuple[float, ...]
    gemm: dict[str, list[GemmSample]]
    conv: list[GemmSample]
    gradients: list[tuple[float, ...]]
    attention: list[tuple[float, ...]]
    cold: tuple[float, ...]
    fresh: float
    sort: float
    bag: float
    unroll: float

    def best(self, other: Library) -> Library:
        """The faster of each figure."""
        dtypes = self.gemm.keys() & other.gemm.keys()
        return Library(
            copies=tuple(map(min, self.copies, other.copies)),
            gemm={d: _faster(self.gemm[d], other.gemm[d]) for d in DTYPES if d in dtypes},
            conv=_faster(self.conv, other.conv),
            gradients=[tuple(map(min, a, b)) for a, b in zip(self.gradients, other.gradients, strict=True)],
            attention=[tuple(map(min, a, b)) for a, b in zip(self.attention, other.attention, strict=True)],
            cold=tuple(map(min, self.cold, other.cold)),
            fresh=min(self.fresh, other.fresh), sort=min(self.sort, other.sort), bag=min(self.bag, other.bag),
            unroll=min(self.unroll, other.unroll),
        )  # fmt: skip

    def bandwidth(self) -> Curve:
        """Bytes per second by size. A smaller copy is never slower than a larger one, but for the call it pays."""
        rates = [size / seconds for size, seconds in zip(probes.COPY_SIZES, self.copies, strict=True)]
        for i in reversed(range(len(rates) - 1)):
            rates[i] = max(rates[i], rates[i + 1])
        return Curve(tuple(float(size) for size in probes.COPY_SIZES), tuple(rates))

    def fits(self, bandwidth: Curve) -> tuple[dict[str, GemmFit], GemmFit]:
        """Products by dtype, and convolutions."""
        found: dict[str, GemmFit] = {}
        for dtype, samples in self.gemm.items():
            found[dtype] = fit_gemm(samples, bandwidth, found.get("float32"))
        return found, fit_gemm(self.conv, bandwidth, tiles=(1, 16))


def take(budget: Budget, tell: Callable[[float, str], None]) -> Library:
    """One round; `tell` hears the fraction of it that is done and what comes next."""
    tell(0.0, "copy bandwidth")
    copies, fresh = probes.copies(budget), probes.fresh()
    gemm: dict[str, list[GemmSample]] = {}
    for step, dtype in enumerate(DTYPES):
        tell(0.3 + 0.08 * step, f"{dtype} matrix products")
        samples = probes.products(dtype, budget)
        if samples:
            gemm[dtype] = samples
    tell(0.7, "convolutions")
    conv, gradients = probes.convolutions(budget), probes.convolution_gradients(budget)
    tell(0.85, "attention and indexing")
    return Library(
        copies, gemm, conv, gradients, probes.attention(budget), probes.cold(budget), fresh,
        probes.sort_seconds(budget), probes.bag_seconds(budget),
        probes.unrolled(budget),
    )  # fmt: skip


def _faster(some: list[GemmSample], others: list[GemmSample]) -> list[GemmSample]:
    return [replace(a, seconds=min(a.seconds, b.seconds)) for a, b in zip(some, others, strict=True)]
