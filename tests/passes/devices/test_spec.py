"""`DeviceSpec`: identity, immutability, JSON, pickling, measured fractions, dtypes without units."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from optpass.errors import ConfigError
from optpass.passes.devices import DeviceSpec, canonical_dtype, compute_dtype, resolve, table


@pytest.fixture
def spec() -> DeviceSpec:
    return resolve("h200")


@dataclass(frozen=True)
class Calibration:
    matmul: float


class Fingerprinted:
    def __init__(self, text: str) -> None:
        self.text = text

    def fingerprint(self) -> str:
        return self.text


CHANGES: dict[str, Callable[[DeviceSpec], DeviceSpec]] = {
    "key": lambda s: replace(s, key="other"),
    "kind": lambda s: replace(s, kind="rocm"),
    "bandwidth": lambda s: replace(s, bandwidth=s.bandwidth + 1),
    "bandwidth_efficiency": lambda s: replace(s, bandwidth_efficiency=0.5),
    "memory_bytes": lambda s: replace(s, memory_bytes=1 + (s.memory_bytes or 0)),
    "no memory_bytes": lambda s: replace(s, memory_bytes=None),
    "sm_count": lambda s: replace(s, sm_count=131),
    "l2_bytes": lambda s: replace(s, l2_bytes=50 * 2**20),
    "launch_s": lambda s: replace(s, launch_s=s.launch_s * 1.01),
    "nvlink_bytes_per_s": lambda s: replace(s, nvlink_bytes_per_s=None),
    "pcie_bytes_per_s": lambda s: replace(s, pcie_bytes_per_s=32e9),
    "capability": lambda s: replace(s, capability=(9, 1)),
    "cpu": lambda s: replace(s, cpu=Calibration(1e9)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_fingerprint_changes_with_every_figure(spec: DeviceSpec, change: Callable[[DeviceSpec], DeviceSpec]) -> None:
    other = change(spec)
    assert other.fingerprint() != spec.fingerprint()
    assert other != spec


def test_fingerprint_changes_with_every_rate_of_every_dtype(spec: DeviceSpec) -> None:
    seen = {spec.fingerprint()}
    for dtype in spec.peak_flops:
        seen.add(replace(spec, peak_flops={**spec.peak_flops, dtype: spec.peak_flops[dtype] * 1.001}).fingerprint())
        seen.add(replace(spec, efficiency={**spec.efficiency, dtype: spec.efficiency[dtype] * 0.999}).fingerprint())
    assert len(seen) == 1 + 2 * len(spec.peak_flops)


def test_fingerprint_covers_the_calibration(spec: DeviceSpec) -> None:
    attached = [Calibration(1.0), Calibration(2.0), Fingerprinted("a"), Fingerprinted("b")]
    assert len({replace(spec, cpu=cpu).fingerprint() for cpu in attached}) == 4
    assert replace(spec, cpu=Fingerprinted("a")) == replace(spec, cpu=Fingerprinted("a"))
    with pytest.raises(ConfigError, match=r"no fingerprint\(\)"):
        replace(spec, cpu=object()).fingerprint()


def test_name_and_citations_do_not_count(spec: DeviceSpec) -> None:
    other = replace(spec, name="another name", sources=dict.fromkeys(spec.sources, "another document"))
    assert other == spec and hash(other) == hash(spec) and len({other, spec}) == 1
    assert spec != "h200"


def test_no_two_devices_share_a_fingerprint() -> None:
    assert len({spec.fingerprint() for spec in table().values()}) == len(table())


def test_fingerprint_is_stable_across_processes(spec: DeviceSpec) -> None:
    code = "from optpass.passes.devices import resolve; print(resolve('h200').fingerprint())"
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert prints == {spec.fingerprint()}


def test_order_of_dtypes_does_not_matter(spec: DeviceSpec) -> None:
    turned = dict(reversed(list(spec.peak_flops.items())))
    assert replace(spec, peak_flops=turned) == spec


@pytest.mark.parametrize("key", table())
def test_json_round_trip(key: str) -> None:
    spec = table()[key]
    again = DeviceSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.to_json() == spec.to_json()
    assert again.capability == spec.capability


def test_json_with_wrong_keys_or_values_is_refused(spec: DeviceSpec) -> None:
    good = spec.to_json()
    with pytest.raises(ConfigError, match="missing key 'bandwidth'"):
        DeviceSpec.from_json({k: v for k, v in good.items() if k != "bandwidth"})
    with pytest.raises(ConfigError, match="unknown key 'speed'"):
        DeviceSpec.from_json({**good, "speed": 1})
    for key, value in {"bandwidth": "fast", "capability": [9], "peak_flops": 3, "memory_bytes": []}.items():
        with pytest.raises(ConfigError, match="cannot be read"):
            DeviceSpec.from_json({**good, key: value})


def test_pickle_and_deepcopy(spec: DeviceSpec) -> None:
    with_cpu = replace(spec, cpu=Fingerprinted("x"))
    assert copy.deepcopy(with_cpu) == with_cpu
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)).sources == spec.sources


def test_spec_is_immutable(spec: DeviceSpec) -> None:
    with pytest.raises(FrozenInstanceError):
        spec.bandwidth = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.peak_flops["float32"] = 1.0  # type: ignore[index]
    given = dict(spec.peak_flops)
    copied = replace(spec, peak_flops=given)
    given["float32"] = 1.0
    assert copied == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth": 0}, "bandwidth is 0.0"),
        ({"launch_s": float("nan")}, "launch_s is nan"),
        ({"bandwidth": None}, "bandwidth is None"),
        ({"bandwidth_efficiency": 1.5}, "more than 1"),
        ({"kind": "tpu"}, "kind 'tpu'"),
        ({"peak_flops": {"float33": 1.0}}, "unknown dtype 'float33'"),
        ({"peak_flops": {"float32": 1.0}}, "name different dtypes"),
        ({"sources": {}}, "has no source"),
    ],
)
def test_impossible_figures_are_refused(spec: DeviceSpec, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(spec, **changes)  # type: ignore[arg-type]


def test_measured_fractions_replace_and_are_cited(spec: DeviceSpec) -> None:
    here = spec.measured(
        "measured here", efficiency={"float32": 0.7, "bfloat16": 1.08}, bandwidth_efficiency=0.9, launch_s=3e-6
    )
    assert here.efficiency["float32"] == 0.7
    assert here.efficiency["bfloat16"] == 1.0  # the datasheet stays the roof
    assert here.efficiency["float16"] == spec.efficiency["float16"]
    assert (here.bandwidth_efficiency, here.launch_s) == (0.9, 3e-6)
    for figure in ("efficiency.float32", "efficiency.bfloat16", "bandwidth_efficiency", "launch_s"):
        assert here.sources[figure] == "measured here"
    assert here.sources["bandwidth"] == spec.sources["bandwidth"]
    assert here != spec
    with pytest.raises(ConfigError, match="different dtypes"):
        resolve("t4").measured("x", efficiency={"float8": 0.5})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("torch.float8_e4m3fn", "float8"),
        ("float8_e5m2fnuz", "float8"),
        ("uint8", "int8"),
        ("torch.complex128", "float64"),
        ("int64", "float32"),
        ("tf32", "tf32"),
    ],
)
def test_dtype_names(given: str, expected: str) -> None:
    assert canonical_dtype(given) == expected


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        canonical_dtype("blfoat16")


def test_dtype_without_units_runs_as_a_wider_one() -> None:
    v100, a100, cpu = resolve("v100"), resolve("a100"), resolve("cpu")
    assert v100.attainable_flops("bfloat16") == v100.attainable_flops("float32")
    assert v100.attainable_flops("float16") > v100.attainable_flops("float32")
    assert a100.attainable_flops("float8_e4m3fn") == a100.attainable_flops("bfloat16")
    assert cpu.attainable_flops("int8") == cpu.attainable_flops("float32")
    assert v100.balance("tf32") == v100.balance("float32")
    with pytest.raises(ConfigError, match=r"no rate is known for float64.*float32"):
        compute_dtype("float64", {"float32"})
