"""Which spec is used for a GPU that is present; the GPU is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optpass.backend import device
from optpass.errors import ConfigError
from optpass.passes import devices
from optpass.passes.devices import DeviceSpec
from optpass.passes.roofline import calibration_gpu

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return properties


def test_a_gpu_that_is_present_is_measured_once_and_then_known(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, DeviceSpec] = {}

    def measured(spec: DeviceSpec, where: torch.device, *, force: bool) -> DeviceSpec:
        assert where == GPU and not force
        known["h200"] = spec.measured("here", efficiency={"bfloat16": 0.5})
        return known["h200"]

    monkeypatch.setattr(calibration_gpu, "cached_spec", lambda spec: known.get("h200", spec))
    monkeypatch.setattr(calibration_gpu, "measured_spec", measured)
    assert device.actual(GPU) == devices.resolve("NVIDIA H200")
    assert device.measured(GPU).efficiency["bfloat16"] == 0.5
    assert device.actual(GPU).efficiency["bfloat16"] == 0.5


def test_a_gpu_in_no_table_is_an_error(gpu: SimpleNamespace) -> None:
    gpu.name = "NVIDIA H20"
    with pytest.raises(ConfigError, match="no device 'NVIDIA H20'"):
        device.actual(GPU)
    with pytest.raises(ConfigError, match="no device 'NVIDIA H20'"):
        device.measured(GPU)
