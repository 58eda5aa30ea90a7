"""Which kernel goes before which on an architecture (`architectures.toml`), and which architecture a device has.

Table format, one TOML table per group of architectures: `device` (torch's device type); `names` ('sm_90', 'cpu');
`default`, the order in which scaled_dot_product_attention itself tries kernels, and `default_with_cudnn`, that order
`from` a version of cuDNN on; `order`, ours, each place with `why` and `source`; `window`, the kernel that goes first
where a sliding window is at most `share` of the keys; `rates`, TFLOP/s that bear the order out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from optpass.errors import ConfigError
from optpass.passes.attention.problem import Problem
from optpass.passes.attention.targets.kernel import Kernel, cited, kernels, read
from optpass.passes.devices import DeviceSpec

FILE = "architectures.toml"
#: Table for a device type whose architecture is not known or not listed.
ANY = MappingProxyType({"cpu": "cpu", "cuda": "gpu"})


@dataclass(frozen=True)
class Place:
    """A kernel's place in an order: why it stands there, and the source of that."""

    kernel: Kernel
    why: str
    source: str


@dataclass(frozen=True)
class Rate:
    """Measured TFLOP/s of a kernel; None where a pass was not measured. `head_dim` None: over several."""

    kernel: str
    source: str
    head_dim: int | None = None
    forward: float | None = None
    backward: float | None = None
    both: float | None = None


@dataclass(frozen=True)
class Architecture:
    """A group of architectures on which kernels stand in one order; the fields are those of the table."""

    key: str
    device: str
    names: tuple[str, ...]
    order: tuple[Place, ...]
    window: Place | None
    window_share: float
    rates: tuple[Rate, ...]
    default: tuple[str, ...]
    cudnn_from: int | None
    default_with_cudnn: tuple[str, ...]

    def places(self, problem: Problem) -> tuple[Place, ...]:
        """The kernels in the order in which they are to be tried for a problem, each once."""
        if self.window is None or problem.window is None or problem.window > self.window_share * problem.keys:
            return self.order
        return (self.window, *(place for place in self.order if place.kernel.name != self.window.kernel.name))

    def tried(self, cudnn: int | None) -> tuple[str, ...]:
        """The kernels in the order in which SDPA itself tries them."""
        newer = self.cudnn_from is not None and cudnn is not None and cudnn >= self.cudnn_from
        return self.default_with_cudnn if newer else self.default


@cache
def architectures() -> Mapping[str, Architecture]:
    """Every group by its key. Read once.

    Raises:
        ConfigError: a kernel or a source that does not exist; the message names the group.
    """
    return MappingProxyType({key: _from_toml(key, raw) for key, raw in read(FILE).items()})


def architecture(device: str, arch: str | None) -> Architecture | None:
    """The group of an architecture; that of any such device where it is not known; None without kernels for it."""
    name = (arch or "").rstrip("abcdef") if (arch or "").startswith("sm_") else arch
    named = (found for found in architectures().values() if found.device == device and name in found.names)
    return next(named, architectures().get(ANY.get(device, "")))


def arch_of(spec: DeviceSpec) -> str | None:
    """The architecture of a device of the device table: 'cpu', 'sm_90', 'gfx94x'; None where the table does not say."""
    if spec.kind == "cpu":
        return "cpu"
    if spec.capability is None:
        return None
    major, minor = spec.capability
    return f"gfx{major}{minor}x" if spec.kind == "rocm" else f"sm_{major}{minor}"


def present(device: str) -> tuple[str | None, int | None]:
    """Architecture and cuDNN version of the device of this type in this machine, None for what there is not."""
    if device == "cpu":
        return "cpu", None
    if device != "cuda" or not torch.cuda.is_available():
        return None, None
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0], None
    version: Callable[[], int | None] = torch.backends.cudnn.version  # typed here, for torch does not
    return "sm_{}{}".format(*torch.cuda.get_device_capability()), version()


def _from_toml(key: str, raw: Mapping[str, Any]) -> Architecture:
    where = f"architecture {key!r}"
    known = kernels(raw["device"])
    window, newer = raw.get("window"), raw.get("default_with_cudnn", {})
    cited(raw["default"]["source"], where)
    for name in (*raw["default"]["order"], *newer.get("order", ())):
        _known(known, name, where)
    return Architecture(
        key=key,
        device=raw["device"],
        names=tuple(raw["names"]),
        order=tuple(_place(known, item, where) for item in raw["order"]),
        window=_place(known, window, where) if window else None,
        window_share=float(window["share"]) if window else 0.0,
        rates=tuple(Rate(**item) for item in raw.get("rates", ()) if cited(item["source"], where)),
        default=tuple(raw["default"]["order"]),
        cudnn_from=newer.get("from"),
        default_with_cudnn=tuple(newer.get("order", ())),
    )


def _place(known: Mapping[str, Kernel], raw: Mapping[str, Any], where: str) -> Place:
    return Place(_known(known, raw["kernel"], where), raw["why"], cited(raw["source"], where))


def _known(known: Mapping[str, Kernel], name: str, where: str) -> Kernel:
    if name not in known:
        raise ConfigError(f"{where}: no kernel is called {name!r}; valid: {', '.join(known)}")
    return known[name]
