"""Which device spec decisions and figures are for: the one named in the options, or the one that the inputs are on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optpass.options import Options
from optpass.passes import devices
from optpass.passes.devices import DeviceSpec
from optpass.passes.roofline import calibration


def spec_for(options: Options, inputs: Sequence[Any]) -> Callable[[], DeviceSpec]:
    """The spec, found when first asked for. Never calibrates: a compile must not wait for that.

    Raises (when called):
        ConfigError: the named device is unknown.
    """
    kind = next((v.device for v in inputs if isinstance(v, torch.Tensor)), torch.device("cpu"))

    @functools.cache
    def find() -> DeviceSpec:
        return named(options.device) if options.device is not None else actual(kind)

    return find


def named(name: str) -> DeviceSpec:
    """The spec called `name`; 'cpu' is this machine's processor, with its calibration if it has been made."""
    if name.casefold() == "cpu":
        return calibration.cached_spec() or devices.resolve("cpu")
    return devices.resolve(name)


def actual(device: torch.device) -> DeviceSpec:
    """The spec of a device that is present; unknown GPUs raise `ConfigError` with the nearest known names."""
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return devices.resolve(
            properties.name, memory_bytes=properties.total_memory, sm_count=properties.multi_processor_count
        )
    return named("cpu")
