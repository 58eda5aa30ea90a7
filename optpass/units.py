"""Bytes, FLOPs and seconds as people write and read them. Nothing here may import torch.

GB is 10^9 bytes and GiB is 2^30 bytes; neither is ever taken for the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from optpass.errors import ConfigError

_FACTORS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | str) -> int:
    """Bytes from an int or a string such as `"20GiB"` or `"500MB"`.

    Raises:
        ConfigError: the value is negative, has an unknown unit, or is not a size at all.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{value!r} is not a size in bytes; write an int, '20GiB' or '500MB'")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{value} bytes is negative; write an int, '20GiB' or '500MB'")
        return value
    match = _SIZE.fullmatch(value)
    factor = _FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{value!r} is not a size in bytes; write an int, '20GiB' or '500MB'")
    return int(Decimal(match[1]) * factor)  # a float would lose bytes above 2^53


@dataclass(frozen=True)
class Budget:
    """A memory budget as it was asked for: a number of bytes, or a share of a device's memory.

    Attributes:
        amount: bytes; None where a share was given.
        share: of the device's memory, in (0, 1]; None where bytes were given.
        text: as it was written, for messages.
    """

    amount: int | None
    share: Decimal | None
    text: str


_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
BUDGET_FORMS = "write an int in bytes, '20GiB', '500MB', or '80%' of a device whose memory is known"


def parse_budget(value: int | str) -> Budget:
    """A memory budget from an int, a size such as `"20GiB"`, or a share such as `"80%"`.

    Raises:
        ConfigError: it is neither, or it is not positive, or more than 100%.
    """
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if share is not None:
        part = Decimal(share[1]) / 100
        if not 0 < part <= 1:
            raise ConfigError(f"{value!r} is no share of a device's memory (above 0%, at most 100%); {BUDGET_FORMS}")
        return Budget(None, part, str(value))
    try:
        amount = parse_bytes(value)
    except ConfigError:
        raise ConfigError(f"{value!r} is not a memory budget; {BUDGET_FORMS}") from None
    if amount < 1:
        raise ConfigError(f"{value!r} leaves no memory at all; {BUDGET_FORMS}")
    return Budget(amount, None, str(value))


def _scaled(value: float, step: float, prefixes: tuple[str, ...], unit: str) -> str:
    magnitude, index = float(value), 0
    # Compared as it will be printed: 999.996 of one prefix is 1.00 of the next.
    while abs(float(_digits(magnitude))) >= step and index < len(prefixes) - 1:
        magnitude, index = magnitude / step, index + 1
    return f"{_digits(magnitude)} {prefixes[index]}{unit}"


def _digits(magnitude: float) -> str:
    """Whole numbers as they are, others with at least three figures."""
    if magnitude.is_integer():
        return f"{magnitude:.0f}"
    return f"{magnitude:.{1 if abs(magnitude) >= 100 else 2}f}"


def format_bytes(value: float) -> str:
    """Binary units: `format_bytes(2**31)` is `'2 GiB'`."""
    return _scaled(value, 1024.0, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), "B")


def format_flops(value: float) -> str:
    """Decimal units: `format_flops(2e12)` is `'2 TFLOP'`."""
    return _scaled(value, 1000.0, ("", "K", "M", "G", "T", "P", "E"), "FLOP")


def format_rate(value: float, unit: str) -> str:
    """A rate in decimal units: `format_rate(4.8e12, 'B/s')` is `'4.80 TB/s'`."""
    return _scaled(value, 1000.0, ("", "K", "M", "G", "T", "P", "E"), unit)


def format_seconds(value: float) -> str:
    """Seconds in the unit that keeps three figures: `'1.24 ms'`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        scaled = value / factor
        if abs(float(f"{scaled:.3g}")) >= 1:  # as it will be printed: 999.9 us is 1 ms
            return f"{scaled:.3g} {unit}" if abs(scaled) < 999.5 else f"{scaled:,.0f} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"
