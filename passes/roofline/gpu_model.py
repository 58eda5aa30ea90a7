"""Time of a kernel on a GPU, or on a processor that was not calibrated: the roofline, with tiles and waves.

Plain sizes and a device spec only. `price` makes records of what is found here; the CPU's own model is `cpu_model`.

A matrix product runs as tiles, one thread block each, in waves over the SMs; extents that are no multiple of the tile
and a last wave that is not full are computed or waited for in full ("tile quantization" and "wave quantization",
NVIDIA, Matrix Multiplication Background User's Guide, docs.nvidia.com/deeplearning/performance). The tile is chosen
as libraries choose it: the one that takes the least time. A tile of m x n does 2 m n FLOPs on m + n operands per step
of K, so smaller tiles feed on more operand traffic per FLOP (same guide); tiles below 128 x 128 are taken to lose rate
in that proportion. Where there are fewer tiles than SMs, K is split among blocks, each of which writes a partial
result in float32 that is read again to be summed ("split-K", NVIDIA CUTLASS documentation, efficient GEMM).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from optpass.errors import ConfigError
from optpass.passes.devices import DeviceSpec, canonical_dtype
from optpass.passes.roofline.cpu_model import Estimate

if TYPE_CHECKING:
    from optpass.passes.roofline.program import OpInfo

#: Output tiles of a thread block, rows x columns (NVIDIA's guide lists these for cuBLAS).
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
SPLITS = (1, 2, 4, 8, 16)
#: Steps of K that a block takes at a time, and the fewest that a split leaves it.
K_STEP = 32
_LEAST_K = 128
_FULL_TILE = 128 * 128 / (128 + 128)
_PARTIAL_BYTES = 4


class RooflineModel:
    """Prices kernels by a device spec.

    Args:
        spec: the device.
        tf32: float32 products run on the tensor cores at reduced precision; `tf32_conv` the same of convolutions.
    """

    def __init__(self, spec: DeviceSpec, tf32: bool = False, tf32_conv: bool = True) -> None:
        self.spec = spec
        self.launch = spec.launch_s
        self.bandwidth = spec.attainable_bandwidth
        self._reduced = {"matmul": tf32, "attention": tf32, "conv": tf32_conv}
        self._rate = functools.lru_cache(maxsize=64)(self._attainable)
        self._product = functools.lru_cache(maxsize=4096)(self._tiled)

    def kernel(
        self, kind: str, ops: Iterable[OpInfo], reads: int, writes: int, elements: int, inner: int = 1, strided: int = 0
    ) -> Estimate:
        """Time of one kernel; arguments as of `CpuModel.kernel`."""
        memory = (reads + writes) / self.bandwidth
        compute = sum(self._op(op) for op in ops)
        return Estimate(compute, memory, self.launch, max(compute, memory) + self.launch)

    def _op(self, op: OpInfo) -> float:
        cost = op.cost
        if cost is None or not cost.flops:
            return 0.0
        products = cost.kind in ("matmul", "conv", "attention")
        rate = self._rate(self.dtype(cost.kind, op.dtype), products)
        if cost.kind == "matmul" and cost.mnk is not None and self.spec.sm_count and min(cost.mnk) > 1:
            m, n, k = cost.mnk
            plain = cost.flops / (2.0 * m * n * k * cost.batch)  # above 1 where several products make one op
            return plain * self._product(m, n, k, cost.batch, rate)
        return cost.flops / rate

    def dtype(self, kind: str, dtype: str) -> str:
        """The dtype whose units an op of `dtype` runs on."""
        if self.spec.kind == "cuda" and dtype in ("float32", "complex64") and self._reduced.get(kind, False):
            return "tf32"
        return dtype

    def _attainable(self, dtype: str, products: bool) -> float:
        """FLOP/s for a dtype; of elementwise arithmetic that of the plain lanes, which compute in float32 at least."""
        try:
            name = canonical_dtype(dtype) if dtype else "float32"
            if not products and name not in ("float64", "float32"):
                name = "float32"
            return self.spec.attainable_flops(name)
        except ConfigError:
            return self.spec.attainable_flops("float32")

    def _tiled(self, m: int, n: int, k: int, batch: int, rate: float) -> float:
        """Seconds of `batch` products at `rate` FLOP/s of the whole device: the best tile and split."""
        units = self.spec.sm_count or 1
        per_unit = rate / units
        best = math.inf
        for rows, columns in TILES:
            speed = min(1.0, rows * columns / (rows + columns) / _FULL_TILE) * per_unit
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
            for split in SPLITS:
                if split > 1 and k / split < _LEAST_K:
                    break
                waves = math.ceil(tiles * split / units)
                depth = math.ceil(k / split / K_STEP) * K_STEP
                partial = 2.0 * split * m * n * batch * _PARTIAL_BYTES / self.bandwidth if split > 1 else 0.0
                best = min(best, waves * 2.0 * rows * columns * depth / speed + partial)
        return best
