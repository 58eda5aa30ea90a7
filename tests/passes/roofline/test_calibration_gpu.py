"""The GPU calibration's logic, on the processor: what is measured, kept, applied and thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optpass.passes import devices
from optpass.passes.roofline import calibration_gpu as gpu


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPASS_CACHE_DIR", str(tmp_path))


def test_measured_fractions_are_of_the_datasheet() -> None:
    spec = devices.resolve("h100")
    found = gpu.measure(spec, torch.device("cpu"), side=64, copy_bytes=1 << 16)
    assert set(found["efficiency"]) == {"float32", "float16", "bfloat16", "float64"} & set(spec.peak_flops)
    assert all(0 < fraction < 0.5 for fraction in found["efficiency"].values())  # a processor is no H100
    assert found["bandwidth_efficiency"] > 0
    assert 0 < found["launch_s"] < 1e-2


def test_a_measurement_is_made_once_kept_and_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = devices.resolve("h100")
    calls = []

    def measure(*_: object, **__: object) -> dict[str, object]:
        calls.append(1)
        return {"efficiency": {"bfloat16": 0.7}, "bandwidth_efficiency": 0.8, "launch_s": 3e-6}

    monkeypatch.setattr(gpu, "measure", measure)
    assert gpu.cached_spec(spec) == spec
    for _ in range(2):
        found = gpu.measured_spec(spec, torch.device("cpu"))
        assert found.efficiency["bfloat16"] == 0.7
        assert found.launch_s == 3e-6
        assert found.fingerprint() != spec.fingerprint()
    assert len(calls) == 1
    assert gpu.cached_spec(spec) == found
    gpu.measured_spec(spec, torch.device("cpu"), force=True)
    assert len(calls) == 2


def test_a_broken_file_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = devices.resolve("a100-80gb")
    measured = {"efficiency": {"bfloat16": 0.9}, "bandwidth_efficiency": 0.8, "launch_s": 3e-6}
    monkeypatch.setattr(gpu, "measure", lambda *_, **__: measured)
    gpu.measured_spec(spec, torch.device("cpu"))
    (file,) = tmp_path.glob("gpu-*.json")
    file.write_text('{"efficiency": 3')
    assert gpu.cached_spec(spec) == spec
    assert gpu.measured_spec(spec, torch.device("cpu")).efficiency["bfloat16"] == 0.9
