"""What is known of one device: peaks, bandwidth, sizes, each with the source it came from.

The figures themselves are data (`*.toml`, read by `table`); names are matched in `resolve`. Nothing here may import
torch, and nothing here measures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, cast, get_args

from optpass.errors import ConfigError
from optpass.passes.devices.dtypes import DTYPES, compute_dtype

Kind = Literal["cuda", "rocm", "cpu"]

_RATES = ("bandwidth", "bandwidth_efficiency", "launch_s", "nvlink_bytes_per_s", "pcie_bytes_per_s")
_COUNTS = ("memory_bytes", "sm_count", "l2_bytes")
_PER_DTYPE = ("peak_flops", "efficiency")
_OPTIONAL = {"nvlink_bytes_per_s", "pcie_bytes_per_s", *_COUNTS}


@dataclass(frozen=True, eq=False)
class DeviceSpec:
    """One device. Immutable; equal and hashable by its fingerprint, so names and citations do not count.

    Raises (on construction):
        ConfigError: a figure is not positive, a fraction is above 1, or a figure has no source.
    """

    key: str
    """The canonical short name, for example `"h200"`."""
    name: str
    """The name people read, for example `"NVIDIA H200 SXM"`."""
    kind: Kind
    peak_flops: Mapping[str, float]
    """Dense matmul peak by dtype, FLOP/s, a multiply-add counted as 2; half and float8 types accumulate in float32.

    The highest rate that a matmul of the dtype reaches: tensor cores where they take it (float64 on A100), the plain
    lanes otherwise (float32). Dtypes without a figure are absent; `attainable_flops` says what stands in for them.
    """
    efficiency: Mapping[str, float]
    """Achievable fraction of `peak_flops`, by the same dtypes, in (0, 1]."""
    bandwidth: float
    """Device memory, datasheet, B/s."""
    bandwidth_efficiency: float
    """Achievable fraction of `bandwidth`, in (0, 1]."""
    memory_bytes: int | None
    """Device memory as labelled, in GiB; ECC and the driver keep up to 8% of it on GDDR parts."""
    sm_count: int | None
    """Streaming multiprocessors, or compute units of an AMD device."""
    l2_bytes: int | None
    """The cache that all of them share: L2, or Infinity Cache where L2 is split among dies."""
    launch_s: float
    """Seconds from one kernel launch to the next that depends on it, when the kernels themselves take no time."""
    nvlink_bytes_per_s: float | None
    """Links to the other devices of a node (NVLink, Infinity Fabric), all together, per direction, B/s."""
    pcie_bytes_per_s: float | None
    """Link to the host (PCIe; NVLink-C2C on Grace parts), per direction, B/s."""
    capability: tuple[int, int] | None
    """What `torch.cuda.get_device_capability` reports."""
    sources: Mapping[str, str]
    """Where each figure comes from: `"bandwidth"`, `"peak_flops.bfloat16"`, `"efficiency.bfloat16"`, ..."""
    cpu: object | None = None
    """A CPU calibration, opaque here; it counts in the fingerprint but is not part of the JSON."""

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen; this is the one moment when it is not yet shared
        for name in _PER_DTYPE:
            rates = {dtype: float(rate) for dtype, rate in getattr(self, name).items()}
            put(self, name, MappingProxyType({dtype: rates[dtype] for dtype in sorted(rates)}))
        for name in (*_RATES, *_COUNTS):
            value = getattr(self, name)
            put(self, name, None if value is None else (int if name in _COUNTS else float)(value))
        if self.capability is not None:
            major, minor = self.capability
            put(self, "capability", (int(major), int(minor)))
        put(self, "sources", MappingProxyType(dict(sorted(self.sources.items()))))
        self._check()

    def _check(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"device {self.key!r}: kind {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        unknown = sorted({*self.peak_flops, *self.efficiency} - set(DTYPES))
        if unknown:
            raise ConfigError(f"device {self.key!r}: unknown dtype {unknown[0]!r}; valid: {', '.join(DTYPES)}")
        if set(self.peak_flops) != set(self.efficiency):
            raise ConfigError(f"device {self.key!r}: peak_flops and efficiency name different dtypes")
        figures = self._figures()
        for figure, value in figures.items():
            if figure == "capability":
                continue
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ConfigError(f"device {self.key!r}: {figure} is {value!r}, which is not a positive number")
            if "efficiency" in figure and value > 1:
                raise ConfigError(f"device {self.key!r}: {figure} is {value!r}, which is more than 1")
        for missing in sorted(figures.keys() - {figure for figure, source in self.sources.items() if source}):
            raise ConfigError(f"device {self.key!r}: {missing} has no source; a figure without one is left out")

    def _figures(self) -> dict[str, object]:
        """Every figure that is given, flat, by the names that `sources` uses."""
        flat: dict[str, object] = {
            f"{name}.{dtype}": rate for name in _PER_DTYPE for dtype, rate in getattr(self, name).items()
        }
        for name in (*_RATES, *_COUNTS, "capability"):
            value = getattr(self, name)
            if value is not None or name not in (*_OPTIONAL, "capability"):
                flat[name] = value
        return flat

    def attainable_flops(self, dtype: str) -> float:
        """FLOP/s that a large, well-shaped matmul of `dtype` reaches here: peak times the achievable fraction.

        A dtype without units runs at the rate of the dtype it is converted to (see `compute_dtype`).

        Raises:
            ConfigError: the dtype is unknown, or neither it nor a wider one has a figure (float64 on some devices).
        """
        used = compute_dtype(dtype, self.peak_flops)
        return self.peak_flops[used] * self.efficiency[used]

    @property
    def attainable_bandwidth(self) -> float:
        """B/s that a large copy reaches here."""
        return self.bandwidth * self.bandwidth_efficiency

    def balance(self, dtype: str) -> float:
        """Machine balance by the datasheet, FLOP/B: below this intensity a kernel is bound by memory."""
        return self.peak_flops[compute_dtype(dtype, self.peak_flops)] / self.bandwidth

    def measured(
        self,
        source: str,
        *,
        efficiency: Mapping[str, float] | None = None,
        bandwidth_efficiency: float | None = None,
        launch_s: float | None = None,
    ) -> DeviceSpec:
        """This spec with achievable fractions measured on a real device, cited as `source`.

        Fractions above 1 (clocks above the rated boost) are cut off at 1: the datasheet stays the roof.

        Raises:
            ConfigError: a fraction for a dtype that has no peak, or a figure that is not positive.
        """
        fractions = {dtype: min(1.0, value) for dtype, value in (efficiency or {}).items()}
        cited = dict.fromkeys((f"efficiency.{dtype}" for dtype in fractions), source)
        changes: dict[str, object] = {"efficiency": {**self.efficiency, **fractions}}
        if bandwidth_efficiency is not None:
            changes["bandwidth_efficiency"] = min(1.0, bandwidth_efficiency)
            cited["bandwidth_efficiency"] = source
        if launch_s is not None:
            changes["launch_s"] = launch_s
            cited["launch_s"] = source
        return DeviceSpec(**{**self._fields(), **changes, "sources": {**self.sources, **cited}})  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """SHA-256 over key, kind, every figure and the CPU calibration; the same in every process.

        Part of the compile cache identity: a changed figure is a changed plan. Name and sources are left out.

        Raises:
            ConfigError: the attached calibration is neither a dataclass nor has a `fingerprint()`.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        canonical = {"key": self.key, "kind": self.kind, **self._figures(), "cpu": self._cpu_identity()}
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()

    def _cpu_identity(self) -> str | None:
        if self.cpu is None:
            return None
        own = getattr(self.cpu, "fingerprint", None)
        if callable(own):
            return str(cast(Callable[[], object], own)())
        if dataclasses.is_dataclass(self.cpu):
            return repr(self.cpu)
        raise ConfigError(f"device {self.key!r}: {type(self.cpu).__name__} has no fingerprint() to put in cache keys")

    def __eq__(self, other: object) -> bool:
        return self.fingerprint() == other.fingerprint() if isinstance(other, DeviceSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def _fields(self) -> dict[str, object]:
        """Constructor arguments, with read-only views turned back into dicts."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dict(v) if isinstance(v, MappingProxyType) else v for name, v in values.items()}

    def __reduce__(self) -> tuple[Callable[[dict[str, object]], DeviceSpec], tuple[dict[str, object]]]:
        return _rebuild, (self._fields(),)  # read-only views do not pickle

    def to_json(self) -> dict[str, object]:
        """Plain JSON values, one key per field; `cpu` is left out (see `from_json`)."""
        values = self._fields()
        del values["cpu"]
        values["capability"] = None if self.capability is None else list(self.capability)
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, object], cpu: object | None = None) -> DeviceSpec:
        """The spec that `to_json` wrote; a calibration is attached by the caller.

        Raises:
            ConfigError: a key is missing or unknown, or a figure is impossible.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"cpu"}
        wrong = sorted(names ^ data.keys())
        if wrong:
            state = "missing" if wrong[0] in names else "unknown"
            raise ConfigError(f"a device description has a {state} key {wrong[0]!r}; valid: {', '.join(sorted(names))}")
        try:
            return cls(**data, cpu=cpu)  # type: ignore[arg-type]
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"a device description cannot be read: {error}") from error


def _rebuild(fields: dict[str, object]) -> DeviceSpec:
    return DeviceSpec(**fields)  # type: ignore[arg-type]


def attainable(spec: DeviceSpec, dtype: str, intensity: float, *, achievable: bool = False) -> float:
    """The roofline: FLOP/s at an arithmetic intensity (FLOP per byte), `min(peak, intensity * bandwidth)`.

    Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. With `achievable` both roofs are what a real kernel
    reaches instead of the datasheet's.

    Raises:
        ConfigError: the intensity is negative or not a number, or the dtype has no figure here.
    """
    if not intensity >= 0:
        raise ConfigError(f"an arithmetic intensity of {intensity!r} FLOP/B is not possible")
    if achievable:
        return min(spec.attainable_flops(dtype), intensity * spec.attainable_bandwidth)
    return min(spec.peak_flops[compute_dtype(dtype, spec.peak_flops)], intensity * spec.bandwidth)
