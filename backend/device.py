"""Which device spec decisions and figures are for: the one named in the options, or the one that the inputs are on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optpass.errors import ConfigError
from optpass.options import Options
from optpass.passes import devices
from optpass.passes.devices import DeviceSpec
from optpass.passes.roofline import calibration, calibration_gpu


def spec_for(options: Options, inputs: Sequence[Any]) -> Callable[[], DeviceSpec]:
    """The spec, found when first asked for. Never calibrates: a compile must not wait for that.

    Raises (when called):
        ConfigError: the named device is unknown.
    """
    present = [v.device for v in inputs if isinstance(v, torch.Tensor)]
    # A CPU scalar beside GPU tensors does not make it a graph for the CPU.
    kind = next((d for d in present if d.type != "cpu"), torch.device("cpu"))

    @functools.cache
    def find() -> DeviceSpec:
        if options.device is None:
            return actual(kind)
        return chosen(options)

    return find


def chosen(options: Options) -> DeviceSpec:
    """The spec that the option `device`, which must be set, names.

    Raises:
        ConfigError: the named device is unknown.
    """
    assert options.device is not None  # the caller's part
    try:
        return named(options.device)
    except ConfigError as error:
        raise ConfigError(f"{options.where('device')}={options.device!r}: {error}") from None


def fingerprint(options: Options, spec: Callable[[], DeviceSpec]) -> str:
    """The device's part of the cache identity. A device that is present but in no table is one by its name.

    Raises:
        ConfigError: the device named in the options is unknown.
    """
    try:
        return spec().fingerprint()
    except ConfigError as error:
        if options.device is not None:
            raise
        return f"unknown: {error}"  # the user's run goes on; the report says that there is no roofline, and why


def named(name: str) -> DeviceSpec:
    """The spec called `name`; 'cpu' is this machine's processor, with its calibration if it has been made."""
    if name.casefold() == "cpu":
        return calibration.cached_spec() or devices.resolve("cpu")
    return devices.resolve(name)


def actual(device: torch.device) -> DeviceSpec:
    """The spec of a device that is present, with what was measured of it before.

    Raises:
        ConfigError: a device in no table, with what to do.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return calibration_gpu.cached_spec(_datasheet(device))
    if device.type == "cpu":
        return named("cpu")
    raise ConfigError(f"no figures for devices of type {device.type!r}; name one to plan for with the option 'device'")


def measured(device: torch.device, *, force: bool = False) -> DeviceSpec:
    """The spec of a device that is present, measured now where that was not done before (a GPU: a few seconds).

    Raises:
        ConfigError: as `actual`.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return calibration_gpu.measured_spec(_datasheet(device), device, force=force)
    return actual(device)


def _datasheet(device: torch.device) -> DeviceSpec:
    """The table's entry for a GPU that is present."""
    properties = torch.cuda.get_device_properties(device)
    return devices.resolve(
        properties.name, memory_bytes=properties.total_memory, sm_count=properties.multi_processor_count
    )
