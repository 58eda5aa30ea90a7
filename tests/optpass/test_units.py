"""Sizes as people write them, and figures as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpass.errors import ConfigError
from optpass.units import format_bytes, format_flops, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0), (7, 7), ("7", 7), ("7B", 7), ("20GiB", 20 * 2**30), ("500MB", 500 * 10**6), ("1.5 kib", 1536),
        (" 2 TB ", 2 * 10**12), ("0.1GB", 10**8), ("9007199254740993B", 9007199254740993),
        ("4194304.5TiB", 4611686568183201792),
    ],
)  # fmt: skip
def test_parse(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "bad", ["80%", "", "GiB", "-5GB", "1e9", "5 XB", "1,5GB", "5GiB/s", True, 1.5, None, -1, "nan"]
)
def test_parse_refuses(bad: object) -> None:
    with pytest.raises(ConfigError, match="write an int, '20GiB' or '500MB'"):
        parse_bytes(bad)  # type: ignore[arg-type]


@given(st.integers(0, 2**62))
def test_bytes_survive_text(size: int) -> None:
    assert parse_bytes(f"{size}B") == size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1000, "1000 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"), (2**31, "2 GiB"), (-1536, "-1.50 KiB"), (2**62, "4096 PiB"), (math.inf, "inf PiB"),
        (150.5 * 2**30, "150.5 GiB"),
    ],
)  # fmt: skip
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_flops_and_rates() -> None:
    assert format_flops(2e12) == "2 TFLOP"
    assert format_flops(999_999) == "1.00 MFLOP"
    assert format_rate(4.8e12, "B/s") == "4.80 TB/s"
    assert format_rate(989e12, "FLOP/s") == "989 TFLOP/s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"), (1, "1 s"), (1.236e-3, "1.24 ms"), (0.9999, "1 s"), (9.999e-4, "1 ms"), (9.996e-7, "1 us"),
        (2.5e-9, "2.5 ns"), (1e-10, "0.1 ns"), (-2e-3, "-2 ms"), (59.96, "60 s"), (12345, "12,345 s"),
        (999.9, "1,000 s"),
    ],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


@given(st.floats(1e-9, 1e6))
def test_seconds_keep_three_figures(value: float) -> None:
    number, unit = format_seconds(value).replace(",", "").split()
    assert "e" not in number
    back = float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert back == pytest.approx(value, rel=6e-3)
