"""Reads the device tables (`*.toml` beside this file) into `DeviceSpec`s and checks them.

Table format, one TOML table per device: `name`, `kind`, `names` (strings that mean this device, or that it shares with
others), `families` (shorthands; the first device listed wins), and `figures`, a list of blocks. Each block has one
`source` (a key of `documents.toml`) and any of:

- `float64` ... `int8`: dense matmul peak, TFLOP/s; `efficiency`: table of achievable fractions by dtype;
- `bandwidth`: GB/s; `bandwidth_efficiency`: fraction; `launch`: microseconds;
- `memory`: GiB; `l2`: MiB; `sm_count`; `capability`: [major, minor];
- `nvlink_total`, `pcie_total`, `c2c_total`: GB/s of both directions together, as vendors print it (halved here).

No figure lives in this module except the defaults for what nobody has measured, and each says that it is one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from optpass.errors import ConfigError
from optpass.passes.devices.dtypes import DTYPES
from optpass.passes.devices.spec import DeviceSpec

#: In the order in which devices are listed.
FILES = ("nvidia_hopper_blackwell.toml", "nvidia_datacenter.toml", "nvidia_geforce.toml", "amd.toml", "cpu.toml")
DOCUMENTS = "documents.toml"

_MAMF = "of the measured bfloat16 fractions in S. Bekman's Maximum Achievable Matmul FLOPS table"


@dataclass(frozen=True)
class _Default:
    value: float
    why: str

    def source(self, kind: str) -> str:
        return f"default for kind {kind}: {self.why}"


_EFFICIENCY = {
    "cuda": _Default(0.80, f"median {_MAMF}, NVIDIA parts (0.73 to 0.87)"),
    "rocm": _Default(0.60, f"upper end {_MAMF}, CDNA 3 parts (0.51 to 0.60)"),
    "cpu": _Default(0.80, "assumption, replaced by calibration"),
}
_BANDWIDTH_EFFICIENCY = {
    "cuda": _Default(0.90, "device-to-device copy on an H200, 4.3 TB/s of 4.8, rounded"),
    "rocm": _Default(0.80, "assumption, not measured"),
    "cpu": _Default(0.80, "assumption, replaced by calibration"),
}
_LAUNCH_S = {
    "cuda": _Default(5e-6, "4 to 6 us per stream launch measured on an RTX 5070 Ti (xiaguan, cuda-kernel-launch-lab)"),
    "rocm": _Default(8e-6, "assumption, not measured"),
    "cpu": _Default(2e-6, "assumption, replaced by calibration"),
}

# figure in the file -> (field, factor to SI)
_SCALARS: dict[str, tuple[str, float]] = {
    "bandwidth": ("bandwidth", 1e9),
    "bandwidth_efficiency": ("bandwidth_efficiency", 1.0),
    "launch": ("launch_s", 1e-6),
    "memory": ("memory_bytes", 2**30),
    "l2": ("l2_bytes", 2**20),
    "sm_count": ("sm_count", 1),
    "nvlink_total": ("nvlink_bytes_per_s", 0.5e9),
    "pcie_total": ("pcie_bytes_per_s", 0.5e9),
    "c2c_total": ("pcie_bytes_per_s", 0.5e9),
}
_ENTRY_KEYS = {"name", "kind", "names", "families", "figures"}


@dataclass(frozen=True)
class Entry:
    """A device and the names it goes by."""

    spec: DeviceSpec
    names: tuple[str, ...]
    families: tuple[str, ...]


@cache
def entries() -> Mapping[str, Entry]:
    """Every device of the tables by key, in listing order. Read once.

    Raises:
        ConfigError: a table is malformed; the message names the device and the figure.
    """
    documents = _read(DOCUMENTS)
    found: dict[str, Entry] = {}
    for file in FILES:
        for key, raw in _read(file).items():
            if key in found:
                raise ConfigError(f"device {key!r} is listed twice ({file})")
            found[key] = entry_from_toml(key, raw, documents)
    return MappingProxyType(found)


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))


def entry_from_toml(key: str, raw: Mapping[str, Any], documents: Mapping[str, str]) -> Entry:
    """One device from its TOML table.

    Raises:
        ConfigError: an unknown key, a figure given twice, or a source that `documents` does not have.
    """
    for unknown in sorted(raw.keys() - _ENTRY_KEYS):
        raise ConfigError(f"device {key!r}: unknown key {unknown!r}; valid: {', '.join(sorted(_ENTRY_KEYS))}")
    kind = raw["kind"]
    values: dict[str, Any] = {"peak_flops": {}, "efficiency": {}}
    sources: dict[str, str] = {}
    for field, value, source in _figures(key, raw["figures"], documents):
        if field in sources:
            raise ConfigError(f"device {key!r}: {field} is given twice")
        sources[field] = source
        group, _, dtype = field.partition(".")
        if dtype:
            values[group][dtype] = value
        else:
            values[field] = value
    _fill_defaults(kind, values, sources)
    optional = dict.fromkeys(("memory_bytes", "sm_count", "l2_bytes", "capability"))
    links = dict.fromkeys(("nvlink_bytes_per_s", "pcie_bytes_per_s"))
    fields = {**optional, **links, **values}
    spec = DeviceSpec(key=key, name=raw["name"], kind=kind, sources=sources, **fields)
    return Entry(spec, (key, raw["name"], *raw.get("names", ())), tuple(raw.get("families", ())))


def _figures(key: str, blocks: list[dict[str, Any]], documents: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """(field, value in SI units, source) of every figure, `peak_flops.<dtype>` for peaks."""
    for block in blocks:
        if block.get("source") not in documents:
            raise ConfigError(f"device {key!r}: source {block.get('source')!r} is not in {DOCUMENTS}")
        source = documents[block["source"]]
        for figure, value in block.items():
            if figure == "source":
                continue
            if figure in DTYPES:
                yield f"peak_flops.{figure}", value * 1e12, source
            elif figure == "efficiency":
                yield from ((f"efficiency.{dtype}", fraction, source) for dtype, fraction in value.items())
            elif figure == "capability":
                yield figure, tuple(value), source
            elif figure in _SCALARS:
                field, factor = _SCALARS[figure]
                yield field, value * factor, source
            else:
                raise ConfigError(f"device {key!r}: unknown figure {figure!r}")


def _fill_defaults(kind: str, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Gives every peak an achievable fraction, and the device a bandwidth fraction and a launch time."""
    peaks, fractions = values["peak_flops"], values["efficiency"]
    for dtype, twin in (("float16", "bfloat16"), ("bfloat16", "float16")):
        # The same units at the same rate: what was measured for one half type holds for the other.
        if dtype not in fractions and twin in fractions and peaks.get(dtype) == peaks.get(twin):
            fractions[dtype] = fractions[twin]
            sources[f"efficiency.{dtype}"] = f"as {twin}, which runs on the same units: {sources[f'efficiency.{twin}']}"
    for dtype in peaks.keys() - fractions.keys():
        fractions[dtype] = _EFFICIENCY[kind].value
        sources[f"efficiency.{dtype}"] = _EFFICIENCY[kind].source(kind)
    for field, defaults in (("bandwidth_efficiency", _BANDWIDTH_EFFICIENCY), ("launch_s", _LAUNCH_S)):
        if field not in values:
            values[field] = defaults[kind].value
            sources[field] = defaults[kind].source(kind)


def table() -> Mapping[str, DeviceSpec]:
    """Every known device by its canonical key, in listing order."""
    return _specs()


@cache
def _specs() -> Mapping[str, DeviceSpec]:
    return MappingProxyType({key: entry.spec for key, entry in entries().items()})


def names() -> tuple[str, ...]:
    """The canonical keys, in listing order."""
    return tuple(entries())
