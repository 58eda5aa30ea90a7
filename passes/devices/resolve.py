"""From a name to a device: short keys, shorthands, and the strings that drivers print.

Matching is exact on a folded name (case, punctuation and vendor words dropped), never by substring, so that a part that
is not in the table is an error and not its larger namesake.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType

from optpass.errors import ConfigError, nearest
from optpass.passes.devices.spec import DeviceSpec
from optpass.passes.devices.table import entries

#: Words that name a vendor or a product line and never tell two parts of the table apart.
_NOISE = {"nvidia", "amd", "tesla", "geforce", "radeon", "instinct", "gpu", "corporation", "r", "tm"}
_LAPTOP = {"laptop", "mobile", "maxq"}
# A driver reports between 92% (GDDR6 with ECC) and 100% of the label in GiB; a partition reports half or less.
_MEMORY_LOW, _MEMORY_HIGH = 0.88, 1.02
_HOW_TO_LIST = "`optpass analyze --list-devices` lists them"


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower().replace("max-q", "maxq"))


def _fold(name: str) -> str:
    """`"NVIDIA A100-SXM4-80GB"` and `"a100 sxm4 80gb"` fold to the same text."""
    return "".join(word for word in _words(name) if word not in _NOISE)


@cache
def _index() -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    """Folded name -> keys that bear it; folded family shorthand -> its members, the one it stands for first."""
    exact: dict[str, list[str]] = defaultdict(list)
    family: dict[str, list[str]] = defaultdict(list)
    for key, entry in entries().items():
        for name in dict.fromkeys(map(_fold, entry.names)):
            exact[name].append(key)
        for name in dict.fromkeys(map(_fold, entry.families)):
            family[name].append(key)
    clash = exact.keys() & family.keys()
    if clash:
        raise ConfigError(f"device tables: {min(clash)!r} is both a name and a family")
    return _freeze(exact), _freeze(family)


def _freeze(index: dict[str, list[str]]) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({name: tuple(keys) for name, keys in index.items()})


def resolve(name: str, *, memory_bytes: int | None = None, sm_count: int | None = None) -> DeviceSpec:
    """The device that `name` means: a key, a shorthand, or what `torch.cuda.get_device_name` or `nvidia-smi` print.

    A bare family name stands for its SXM part with the most memory (`"a100"` is the 80 GB SXM part, `"v100"` the 32 GB
    one). `memory_bytes` and `sm_count`, where they were measured, choose among parts that share a name, and a part that
    contradicts them is refused: pass them for a device that is really there. `"cpu"` is a generic processor with low
    figures; a calibrated one is attached by the caller.

    Raises:
        ConfigError: the name is not in the table, means several parts, is a slice of a device (MIG) or a laptop part,
            or contradicts what was measured. The message names the nearest keys.
    """
    folded = _fold(name)
    exact, family = _index()
    if folded in exact:
        fitting = _fitting(name, exact[folded], memory_bytes, sm_count)
        if len(fitting) > 1:
            raise ConfigError(
                f"{name!r} is the name of {len(fitting)} devices ({_keys(fitting)}); name one of the keys, "
                "or give the measured memory size or SM count"
            )
        return entries()[fitting[0]].spec
    if folded in family:
        return entries()[_fitting(name, family[folded], memory_bytes, sm_count)[0]].spec
    raise ConfigError(_unknown(name))


def _fitting(name: str, keys: tuple[str, ...], memory_bytes: int | None, sm_count: int | None) -> list[str]:
    fitting = [key for key in keys if _fits(entries()[key].spec, memory_bytes, sm_count)]
    if fitting:
        return fitting
    given = [f"{memory_bytes / 2**30:.1f} GiB"] if memory_bytes is not None else []
    given += [f"{sm_count} SMs"] if sm_count is not None else []
    known = "; ".join(_figures(entries()[key].spec) for key in keys)
    raise ConfigError(
        f"{name!r} was measured with {' and '.join(given)}, but the table knows {known}: "
        "a partition (MIG, vGPU) or another variant; name a key to plan for that device"
    )


def _fits(spec: DeviceSpec, memory_bytes: int | None, sm_count: int | None) -> bool:
    if memory_bytes is None or spec.memory_bytes is None:
        memory_fits = True
    else:
        memory_fits = _MEMORY_LOW <= memory_bytes / spec.memory_bytes <= _MEMORY_HIGH
    return memory_fits and (sm_count is None or spec.sm_count is None or sm_count == spec.sm_count)


def _figures(spec: DeviceSpec) -> str:
    memory = "memory unknown" if spec.memory_bytes is None else f"{spec.memory_bytes / 2**30:.0f} GiB"
    return f"{spec.key} ({memory}, {spec.sm_count or 'unknown number of'} SMs)"


def _unknown(name: str) -> str:
    """Why `name` is not a device of the table, and what to write instead."""
    words = set(_words(name))
    keys = list(entries())
    if "mig" in words:
        whole = re.split(r"(?i)\bmig\b", name)[0].strip()
        return (
            f"{name!r} is a MIG slice, which has only a part of the SMs and the bandwidth of {whole or 'its device'}; "
            f"name a whole device to plan for that instead ({_HOW_TO_LIST})"
        )
    if words & _LAPTOP:
        return (
            f"{name!r} is a laptop part, with fewer SMs and lower clocks than the desktop part of that name, and "
            f"not in the table; name a device to plan for that instead ({_HOW_TO_LIST})"
        )
    close = nearest("-".join(word for word in _words(name) if word not in _NOISE), keys)
    hint = f"nearest: {_keys(close)}; " if close else ""
    return f"no device {name!r} in the table; {hint}{_HOW_TO_LIST}"


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(repr(key) for key in keys)
