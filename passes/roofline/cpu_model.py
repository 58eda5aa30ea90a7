"""Time of a kernel on a calibrated processor: library calls by fitted rates, fused loops by cost per element.

Reads a calibration and plain sizes only: no tensors, no measuring. `price` makes records of what is found here.

Library calls (matrix products, convolutions, attention) take the slower of arithmetic at the fitted rate and memory.
Fused loops are C++ loops that the inner compiler vectorises: each operation adds its cost per element and the loads
and stores theirs, because in-cache loops of a few operations are bound by issue and not by one resource alone (Hofmann
et al., "Analytic performance modeling and analysis of detailed neuron simulations", the ECM model without overlap).
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpass.passes.roofline.calibration_data import VECTOR, CpuCalibration, attention_products

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpass.passes.roofline.program import OpInfo

#: Elements per thread below which the inner compiler leaves a loop serial (`config.cpp.min_chunk_size`).
SERIAL_ELEMENTS = 512

#: Class of an op's library function by words in its name; the first that fits. The rest count as `exp`.
_FUNCTIONS = (
    (("tanh", "mish"), "tanh"),
    (("erf", "gelu", "ndtr"), "erf"),
    (("rsqrt", "sqrt", "norm", "var", "std", "hypot", "cbrt"), "sqrt"),
    (("sin", "cos", "tan", "polar", "angle"), "sin"),
    (("pow", "gamma", "zeta", "bessel"), "pow"),
    (("log", "softplus", "entr", "logit"), "log"),
)
_DIVISIONS = ("div", "true_divide", "reciprocal", "sigmoid", "silu", "softmax", "remainder", "fmod")
_HALVES = ("bfloat16", "float16")
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
#: Working sets that a core's own cache holds, and from which on operands cost what they cost cold: products of
#: 64 x 1024 x 1024 on weights that take turns slow down from 4 MB to 24 MB and not beyond (Zen 5, 1 MB of L2 a core).
NEAR_BYTES = 2 << 20
FAR_BYTES = 24 << 20
#: Input elements up to which a convolution of batch 1 is unrolled, see `unrolled`.
_UNROLLED_ELEMENTS = 20480
_FIRST_SHAPE = re.compile(r"\w+\[(\d+(?:, \d+)+)\]")
#: Lanes of a vector, for loops that run element by element (scans, sorts) and cost this much more per operation.
_LANES = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one kernel: its arithmetic, its memory traffic, what it costs to call, and all of it."""

    compute_s: float
    memory_s: float
    launch_s: float
    total_s: float


class CpuModel:
    """Prices kernels by one calibration.

    Args:
        calibration: of the processor.
        traffic: bytes that one step moves in all, between two uses of a weight: what the caches hold of it depends
            on that.
    """

    def __init__(self, calibration: CpuCalibration, traffic: int = 0) -> None:
        self.c = calibration
        self.cold = self._cold(traffic)

    def kernel(
        self, kind: str, ops: Iterable[OpInfo], reads: int, writes: int, elements: int, inner: int = 1, strided: int = 0
    ) -> Estimate:
        """Time of one kernel.

        Args:
            kind: as of `GroupInfo`.
            ops: the ops in it.
            reads, writes: bytes across its boundary; `strided` of the reads go across the grain.
            elements: iterations of its largest loop nest; `inner` of them make one result of a reduction.
        """
        members = list(ops)
        if kind in ("matmul", "conv", "attention"):
            main = next((op for op in reversed(members) if op.cost is not None and op.cost.kind == kind), None)
            if main is not None and main.cost is not None and main.cost.flops:  # an empty batch has none
                return self._library(kind, main, reads + writes)
        return self._loops(kind, members, reads, writes, elements, strided)

    # ---- library calls --------------------------------------------------------------------------------------------

    def _library(self, kind: str, op: OpInfo, moved: int) -> Estimate:
        cost = op.cost
        assert cost is not None
        if kind == "attention":
            return self._attention(op, moved)
        m, n, k = cost.mnk or (1, 1, 1)
        if kind == "conv":
            return self._convolution(op, m, n, k, moved)
        fit = self.c.gemm.get(op.dtype) or self.c.gemm["float32"]
        # The first operand was just computed. The second is a weight, or was saved long ago, unless it is one of a
        # batch; the result goes to memory that other kernels used in between.
        far = m * n * cost.batch + (n * k if cost.batch == 1 else 0)
        cold = self.cold * far * ITEMSIZE.get(op.dtype, 4) * self.c.cold_s
        return self._called(cost.flops / fit.rate(m, n, k), moved, fit.call_s, cold)

    def _attention(self, op: OpInfo, moved: int) -> Estimate:
        """Products in blocks, and the softmax of every score."""
        cost = op.cost
        assert cost is not None
        _, keys, width = cost.mnk or (1, 1, 1)
        fit = self.c.gemm.get(op.dtype) or self.c.gemm["float32"]
        products = attention_products(cost.flops, keys, width, fit.rate)
        way, each = ("backward", 10.0) if "backward" in op.target else ("forward", 4.0)
        scores = cost.flops / (each * width)
        softmax = scores * (self.c.attention[way] + keys % VECTOR / keys * self.c.attention[f"{way}_tail"])
        return self._called(products + softmax, moved, 0.0)

    def _convolution(self, op: OpInfo, m: int, n: int, k: int, moved: int) -> Estimate:
        """A convolution as a product; of a gradient, `mnk` is that of the input's: [M, C_out] x [C_out, K]."""
        cost = op.cost
        assert cost is not None
        backward = "backward" in op.target
        if backward:
            n, k = k, n
        products = cost.flops / (2 * m * n * k * cost.batch)  # 2 for both gradients
        if unrolled(op, n * k):
            # One im2col (or col2im) per product, whose rows are the output's channels.
            columns = m * k * cost.batch * max(1.0, products)
            compute = cost.flops / self.c.gemm["float32"].rate(n, m, k) + columns * self.c.element_s["unroll"]
            return self._called(compute, moved, self.c.conv.call_s)
        speed = self.c.conv_backward if backward else 1.0
        wide = self.c.gemm.get(op.dtype)
        if wide is not None:
            speed *= wide.peak / self.c.gemm["float32"].peak
        call = self.c.conv.call_s * max(1.0, products)
        return self._called(cost.flops / (self.c.conv.rate(m, n, k) * speed), moved, call)

    def _called(self, compute: float, moved: int, call: float, cold: float = 0.0) -> Estimate:
        memory = moved / self.c.bandwidth.at(moved) if moved else 0.0
        launch = self.c.kernel_s + call
        return Estimate(compute, memory + cold, launch, max(compute, memory) + cold + launch)

    @staticmethod
    def _cold(traffic: int) -> float:
        """How far out memory has gone when it is used again: 0 in a core's own cache, 1 beyond it."""
        if traffic <= NEAR_BYTES:
            return 0.0
        return min(1.0, math.log(traffic / NEAR_BYTES) / math.log(FAR_BYTES / NEAR_BYTES))

    # ---- fused loops ----------------------------------------------------------------------------------------------

    def _loops(self, kind: str, ops: list[OpInfo], reads: int, writes: int, elements: int, strided: int) -> Estimate:
        cost = self.c.element_s
        compute = sum(self._op_seconds(op) for op in ops)
        compute += strided / 4 * cost["transpose"]
        if ops and ops[-1].dtype in _HALVES:
            compute += (reads + writes) / 4 * cost["half"]
        moved = reads + writes
        # What a kernel reads was mostly written by the one before it, so both their footprints compete for the cache.
        memory = moved / self.c.bandwidth.at(2 * moved) if moved else 0.0
        launch = self.c.kernel_s
        if elements < SERIAL_ELEMENTS * self.c.threads:
            compute, memory = compute * self.c.threads, memory
        else:
            launch += self.c.region_s
        return Estimate(compute, memory, launch, compute + memory + launch)

    def _op_seconds(self, op: OpInfo) -> float:
        """Arithmetic of one op of a fused loop, all its elements together."""
        cost, table = op.cost, self.c.element_s
        if cost is None:
            return 0.0
        name = op.target
        if cost.kind == "rng":
            return max(cost.flops, 1) * table["random"]
        if cost.kind == "reduction":
            return cost.flops * max(table["arithmetic"], table["reduce_inner"] - table["load"] / 2)
        if cost.kind == "sort":
            return cost.flops * table["sort"]
        if cost.kind in ("scan", "other", "fft", "rnn"):
            return cost.flops * table["arithmetic"] * _LANES
        if cost.kind == "indexing" and cost.flops:
            return cost.flops * table["bag" if "embedding_bag" in name else "scatter"]
        plain = cost.flops - cost.transcendental
        seconds = plain * table["arithmetic"]
        if cost.transcendental:
            seconds += cost.transcendental * table[function_class(name)]
        if divides(name):
            # One division among the plain operations of each element.
            seconds += max(1, cost.transcendental or plain) * table["divide"]
        return seconds


def unrolled(op: OpInfo, weights: int) -> bool:
    """Whether a convolution runs as im2col and a matrix product instead of in oneDNN.

    As `use_mkldnn` of aten/src/ATen/native/Convolution.cpp: float32, one group, a batch of 1, an input of at most
    20480 elements. (Filters larger than 3 x 3 go to oneDNN as well; their size is not known here.)
    """
    cost = op.cost
    first = _FIRST_SHAPE.match(op.shape)
    if cost is None or first is None or op.dtype != "float32" or cost.batch > 1:
        return False
    sizes = [int(size) for size in first[1].split(",")]
    if "backward" in op.target:
        elements = math.prod(sizes)
    else:
        elements = op.reads // 4 - weights
    return sizes[0] == 1 and elements <= _UNROLLED_ELEMENTS


@functools.lru_cache(maxsize=4096)
def function_class(target: str) -> str:
    """Class of the library function that an op evaluates: `'tanh'` for `'aten.tanh.default'`."""
    name = target.split(".")[1] if "." in target else target
    return next((found for words, found in _FUNCTIONS if any(word in name for word in words)), "exp")


@functools.lru_cache(maxsize=4096)
def divides(target: str) -> bool:
    """Whether an op's formula divides."""
    name = target.split(".")[1] if "." in target else target
    return any(word in name for word in _DIVISIONS)


__all__ = ["CpuModel", "Estimate", "divides", "function_class", "unrolled"]
