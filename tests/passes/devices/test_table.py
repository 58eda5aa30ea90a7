"""The figures: every one sourced, dense, plausible, and equal to the documents where those are known by heart."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import resources

import pytest

from optpass.errors import ConfigError
from optpass.passes.devices import DTYPES, DeviceSpec, attainable, table
from optpass.passes.devices.table import DOCUMENTS, FILES, entry_from_toml

SPECS = list(table().values())
GPUS = [spec for spec in SPECS if spec.kind != "cpu"]


def each(specs: list[DeviceSpec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", specs, ids=[spec.key for spec in specs])


@each(SPECS)
def test_every_figure_has_a_source_and_no_source_is_left_over(spec: DeviceSpec) -> None:
    figures = {f"{group}.{d}" for group in ("peak_flops", "efficiency") for d in getattr(spec, group)}
    scalars = ("bandwidth", "bandwidth_efficiency", "memory_bytes", "sm_count", "l2_bytes", "launch_s")
    links = ("nvlink_bytes_per_s", "pcie_bytes_per_s", "capability")
    figures |= {name for name in (*scalars, *links) if getattr(spec, name) is not None}
    assert set(spec.sources) == figures
    assert all(len(source) > 20 for source in spec.sources.values())


@each(SPECS)
def test_what_is_not_measured_says_so(spec: DeviceSpec) -> None:
    for figure, source in spec.sources.items():
        if figure.startswith(("efficiency", "bandwidth_efficiency", "launch_s")):
            assert source.startswith(("Measured: ", "default for kind ", "as bfloat16", "as float16")), (figure, source)


@each(GPUS)
def test_peaks_are_dense_and_ordered(spec: DeviceSpec) -> None:
    peak = spec.peak_flops
    assert {"float64", "float32", "float16"} <= set(peak) <= set(DTYPES)
    assert peak["float16"] <= 2500e12  # GB200, the fastest here; a figure with sparsity would stand out
    assert peak["float64"] <= peak["float32"] <= peak["float16"]
    if "bfloat16" in peak:
        assert peak["bfloat16"] == peak["float16"]
    if "tf32" in peak:
        # Half of the half-precision rate by design; B200 and A10 print rounded figures.
        assert peak["tf32"] * 2 == pytest.approx(peak["float16"], rel=0.02)
    for narrow in ("float8", "int8"):
        if narrow in peak:
            ratio = peak[narrow] / peak["float16"]
            assert any(ratio == pytest.approx(known, rel=0.02) for known in (1, 2, 4)), (narrow, ratio)


@each(GPUS)
def test_balance_and_sizes_are_plausible(spec: DeviceSpec) -> None:
    assert 20 < spec.balance("float16") < 425  # P100 has no tensor cores: 26; L40S, GDDR6 under a large die: 419
    assert spec.memory_bytes is not None and 8 * 2**30 <= spec.memory_bytes <= 256 * 2**30
    assert 0.5 < spec.efficiency["float16"] <= 1
    assert 1e-6 <= spec.launch_s <= 2e-5
    if spec.pcie_bytes_per_s is not None:
        assert 16e9 <= spec.pcie_bytes_per_s <= 450e9
    if spec.nvlink_bytes_per_s is not None:
        assert spec.nvlink_bytes_per_s <= 900e9  # per direction: B200's 1.8 TB/s is both


@each(GPUS)
def test_capability_matches_the_dtypes(spec: DeviceSpec) -> None:
    assert spec.capability is not None
    if spec.kind == "cuda":
        assert ("bfloat16" in spec.peak_flops) == (spec.capability >= (8, 0))
        assert ("float8" in spec.peak_flops) == (spec.capability >= (8, 9))
        rates = ((6, 0), 2), ((7, 0), 2), ((7, 5), 32), ((8, 0), 1), ((8, 6), 64), ((8, 9), 64), ((9, 0), 1)
        double_rate = dict((*rates, ((10, 0), 2), ((12, 0), 64)))
        ratio = spec.peak_flops["float32"] / spec.peak_flops["float64"]
        assert ratio == pytest.approx(double_rate[spec.capability], rel=0.02)


@each([s for s in GPUS if s.kind == "cuda" and s.capability and s.capability >= (7, 0)])
def test_float32_peak_is_lanes_times_a_real_clock(spec: DeviceSpec) -> None:
    assert spec.sm_count is not None and spec.capability is not None
    lanes = 64 if spec.capability in ((7, 0), (7, 5), (8, 0)) else 128
    clock = spec.peak_flops["float32"] / (spec.sm_count * lanes * 2)
    assert 1.3e9 < clock < 2.7e9


KNOWN = [  # (device, dtype, TFLOP/s, GB/s): well-known errors of other tables among them
    ("h100", "float32", 67, 3350),  # often 33.5
    ("h100", "bfloat16", 989.5, 3350),  # often 1979
    ("l4", "bfloat16", 121, 300),  # often 242 and 3350 GB/s
    ("a100-sxm-80gb", "bfloat16", 312, 2039),
    ("a100-sxm-40gb", "tf32", 156, 1555),
    ("h200", "float8", 1979, 4800),
    ("b200", "bfloat16", 2250, 8000),
    ("rtx-4090", "float16", 165.2, 1008),  # often 330.3, which accumulates in float16
    ("rtx-5090", "float16", 209.5, 1792),
    ("a10g", "float16", 70, 600),  # often the A10's 125
    ("t4", "int8", 130, 320),
    ("mi300x", "bfloat16", 1307.4, 5300),
    ("mi250x", "float16", 191.5, 1638.4),  # one die; often the module's 383
]


@pytest.mark.parametrize(("key", "dtype", "tflops", "gbs"), KNOWN)
def test_known_figures(key: str, dtype: str, tflops: float, gbs: float) -> None:
    spec = table()[key]
    assert spec.peak_flops[dtype] == pytest.approx(tflops * 1e12)
    assert spec.bandwidth == pytest.approx(gbs * 1e9)


def test_measured_fractions() -> None:
    for key, fraction in {"a100-sxm-80gb": 0.869, "h100": 0.803, "h200": 0.803, "b200": 0.776, "mi300x": 0.514}.items():
        spec = table()[key]
        assert spec.efficiency["bfloat16"] == spec.efficiency["float16"] == fraction
        assert spec.attainable_flops("bfloat16") == pytest.approx(fraction * spec.peak_flops["bfloat16"])
    assert table()["h200"].attainable_bandwidth == pytest.approx(4.3e12, rel=1e-3)


def test_golden_intensities() -> None:
    spec = table()["h200"]
    add = 1 / 12  # float32 add: one FLOP, two reads and a write of 4 bytes
    assert attainable(spec, "float32", add) == pytest.approx(4.8e12 / 12)
    matmul = 2 * 4096**3 / (3 * 4096**2 * 2)  # bfloat16 4096^3
    assert matmul == pytest.approx(4096 / 3)
    assert attainable(spec, "bfloat16", matmul) == 989.5e12
    ridge = spec.balance("bfloat16")
    assert attainable(spec, "bfloat16", ridge * 0.999) < spec.peak_flops["bfloat16"]
    assert attainable(spec, "bfloat16", ridge * 1.001) == spec.peak_flops["bfloat16"]
    assert attainable(spec, "bfloat16", matmul, achievable=True) == pytest.approx(0.803 * 989.5e12)
    assert attainable(spec, "float32", add, achievable=True) == pytest.approx(0.896 * 4.8e12 / 12)
    assert attainable(spec, "float32", 0.0) == 0.0
    for impossible in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="intensity"):
            attainable(spec, "float32", impossible)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figures": [{"source": "nowhere", "float32": 1.0}]}, "'nowhere' is not in " + DOCUMENTS),
        ({"figures": [{"source": "doc", "flops": 1.0}]}, "unknown figure 'flops'"),
        ({"figures": [{"source": "doc", "l2": 4}, {"source": "doc", "l2": 5}]}, "l2_bytes is given twice"),
        ({"figures": [{"source": "doc", "float32": -1.0, "bandwidth": 1}]}, "not a positive number"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_malformed_entry_is_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "name": "X",
        "kind": "cuda",
        "figures": [{"source": "doc", "float32": 1.0, "bandwidth": 100, "c2c_total": 900}],
    }
    documents = {"doc": "a document"}
    spec = entry_from_toml("x", good, documents).spec
    assert (spec.peak_flops["float32"], spec.bandwidth, spec.pcie_bytes_per_s) == (1e12, 1e11, 450e9)
    with pytest.raises(ConfigError, match=message):
        entry_from_toml("x", {**good, **change}, documents)


def test_every_document_is_cited() -> None:
    folder = resources.files("optpass.passes.devices")
    documents = tomllib.loads(folder.joinpath(DOCUMENTS).read_text())
    cited = {
        block["source"]
        for file in FILES
        for raw in tomllib.loads(folder.joinpath(file).read_text()).values()
        for block in raw["figures"]
    }
    assert cited == set(documents)


def test_listing_imports_no_torch() -> None:
    code = (
        "import sys; from optpass.passes.devices import names, resolve; "
        "assert resolve('NVIDIA H200').key == 'h200' and len(names()) > 40; "
        "assert not [m for m in sys.modules if m.split('.')[0] == 'torch'], 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
