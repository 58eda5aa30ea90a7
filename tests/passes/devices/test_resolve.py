"""Names of devices: what drivers print, what people type, and what must not be taken for something it is not."""

from __future__ import annotations

import pytest

from optpass.errors import ConfigError
from optpass.passes.devices import names, resolve, table

GIB = 2**30

DRIVER_STRINGS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 120GB": "gh200",
    "NVIDIA GH200 144G HBM3e": "gh200-144gb",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A30": "a30",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A40": "a40",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "NVIDIA T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
    "Tesla V100-PCIE-16GB": "v100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla V100S-PCIE-32GB": "v100s",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P100-SXM2-16GB": "p100-sxm2-16gb",
    "NVIDIA RTX A6000": "rtx-a6000",
    "RTX A6000": "rtx-a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA TITAN RTX": "titan-rtx",
    "TITAN RTX": "titan-rtx",
    "NVIDIA GeForce RTX 2080 Ti": "rtx-2080-ti",
    "GeForce RTX 2080 Ti": "rtx-2080-ti",
    "NVIDIA GeForce RTX 3070": "rtx-3070",
    "NVIDIA GeForce RTX 3080": "rtx-3080",
    "NVIDIA GeForce RTX 3080 Ti": "rtx-3080-ti",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 3090 Ti": "rtx-3090-ti",
    "NVIDIA GeForce RTX 4060": "rtx-4060",
    "NVIDIA GeForce RTX 4070": "rtx-4070",
    "NVIDIA GeForce RTX 4070 Ti": "rtx-4070-ti",
    "NVIDIA GeForce RTX 4080": "rtx-4080",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5070": "rtx-5070",
    "NVIDIA GeForce RTX 5070 Ti": "rtx-5070-ti",
    "NVIDIA GeForce RTX 5080": "rtx-5080",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "AMD Instinct MI210": "mi210",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
    "AMD Instinct MI325X": "mi325x",
}

TYPED = {
    "h100": "h100",
    "H100-SXM": "h100",
    "h100_pcie": "h100-pcie",
    "H200": "h200",
    "a100": "a100-sxm-80gb",
    "a100-80gb": "a100-sxm-80gb",
    "A100 40GB": "a100-sxm-40gb",
    "a100 pcie": "a100-pcie-80gb",
    "v100": "v100-sxm2-32gb",
    "V100-16GB": "v100-sxm2-16gb",
    "p100": "p100-sxm2-16gb",
    "4090": "rtx-4090",
    "RTX4090": "rtx-4090",
    "rtx 3090 ti": "rtx-3090-ti",
    "a6000": "rtx-a6000",
    "MI300x": "mi300x",
    "gh200": "gh200",
    "cpu": "cpu",
}

# Real parts, each close to one of the table, none in it.
NEAR_MISSES = [
    "NVIDIA H20",
    "NVIDIA H800",
    "NVIDIA H800 PCIe",
    "NVIDIA H100 96GB HBM3",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA A800 80GB PCIe",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A16",
    "NVIDIA A2",
    "NVIDIA L20",
    "NVIDIA L40G",
    "NVIDIA B100",
    "NVIDIA B300 SXM6 AC",
    "NVIDIA GB300",
    "NVIDIA GB10",
    "NVIDIA T4G",
    "NVIDIA T400",
    "Tesla V100-SXM3-32GB",
    "Tesla V100-DGXS-32GB",
    "Tesla V100-FHHL-16GB",
    "Tesla P100-PCIE-12GB",
    "Tesla P40",
    "Quadro RTX 6000",
    "NVIDIA RTX A5000",
    "NVIDIA RTX 5000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA GeForce RTX 3050",
    "NVIDIA GeForce RTX 3070 Ti",
    "NVIDIA GeForce RTX 4070 SUPER",
    "NVIDIA GeForce RTX 4080 SUPER",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce GTX 1080",
    "NVIDIA GeForce RTX 2080",
    "NVIDIA TITAN V",
    "GRID A100-40C",
    "NVIDIA A40-48Q",
    "NVIDIA A10-24Q",
    "AMD Instinct MI300A",
    "AMD Instinct MI100",
    "AMD Radeon RX 7900 XTX",
    "",
    "cuda:0",
]


@pytest.mark.parametrize(("name", "key"), [*DRIVER_STRINGS.items(), *TYPED.items()])
def test_name_resolves_to_its_device(name: str, key: str) -> None:
    assert resolve(name).key == key


def test_enough_driver_strings_are_covered() -> None:
    assert len(DRIVER_STRINGS) >= 40


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090"])
def test_case_and_punctuation_do_not_matter(name: str) -> None:
    expected = resolve(name)
    for spelling in (name.upper(), name.lower(), name.replace(" ", "_"), name.replace("-", " "), f"  {name} "):
        assert resolve(spelling) == expected


def test_every_key_and_display_name_resolves_to_itself() -> None:
    assert len(names()) == len(set(names())) == len(table())
    for key, spec in table().items():
        assert resolve(key) is spec
        assert resolve(spec.name) is spec


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    assert repr(name) in str(caught.value)
    assert "--list-devices" in str(caught.value)


def test_unknown_name_gets_the_nearest_keys() -> None:
    with pytest.raises(ConfigError, match=r"nearest: .*'h200'"):
        resolve("NVIDIA H20")
    with pytest.raises(ConfigError, match="'rtx-4090'"):
        resolve("NVIDIA GeForce RTX 4090 D")


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_mig_slice_is_not_the_whole_device(name: str) -> None:
    with pytest.raises(ConfigError, match="MIG slice"):
        resolve(name)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3080 Laptop GPU", "GeForce RTX 2080 with Max-Q Design"],
)
def test_laptop_part_is_not_the_desktop_part(name: str) -> None:
    with pytest.raises(ConfigError, match="laptop part"):
        resolve(name)


def test_measured_memory_chooses_among_parts_that_share_a_name() -> None:
    assert resolve("v100", memory_bytes=16160 * 2**20).key == "v100-sxm2-16gb"
    assert resolve("v100", memory_bytes=32510 * 2**20).key == "v100-sxm2-32gb"
    assert resolve("a100", memory_bytes=40339 * 2**20).key == "a100-sxm-40gb"
    assert resolve("NVIDIA GeForce RTX 4060 Ti", memory_bytes=16 * GIB).key == "rtx-4060-ti-16gb"
    assert resolve("NVIDIA GeForce RTX 4060 Ti", memory_bytes=8 * GIB).key == "rtx-4060-ti-8gb"


def test_shared_name_without_a_measurement_is_ambiguous() -> None:
    with pytest.raises(ConfigError, match="'rtx-4060-ti-8gb', 'rtx-4060-ti-16gb'"):
        resolve("NVIDIA GeForce RTX 4060 Ti")


@pytest.mark.parametrize("name", ["AMD Instinct MI250X / MI250", "AMD Instinct MI250X/MI250"])
def test_compute_units_tell_mi250x_from_mi250(name: str) -> None:
    assert resolve(name, sm_count=110).key == "mi250x"
    assert resolve(name, sm_count=104).key == "mi250"
    with pytest.raises(ConfigError, match="'mi250', 'mi250x'"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("NVIDIA H100 80GB HBM3", 81559),
        ("NVIDIA H200", 143156),
        ("NVIDIA B200", 182642),
        ("NVIDIA A10G", 22587),
        ("NVIDIA L40S", 45589),
        ("Tesla T4", 15095),
        ("AMD Instinct MI300X", 196592),
        ("NVIDIA H100 NVL", 95830),
    ],
)
def test_memory_that_drivers_report_fits_the_label(name: str, mib: int) -> None:
    assert resolve(name, memory_bytes=mib * 2**20) == resolve(name)


def test_contradicting_measurement_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"6\.0 GiB.*a partition"):
        resolve("Tesla T4", memory_bytes=6 * GIB)
    with pytest.raises(ConfigError, match="70 SMs"):  # the 12 GB RTX 3080 carries the same name
        resolve("NVIDIA GeForce RTX 3080", memory_bytes=12 * GIB, sm_count=70)
    with pytest.raises(ConfigError, match="42 SMs"):
        resolve("NVIDIA A100-SXM4-80GB", sm_count=42)
