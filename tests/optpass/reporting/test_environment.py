"""What the system says of its processor, as Linux and Windows put it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optpass.reporting import environment

ZEN4 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD   EPYC

processor\t: 1
vendor_id\t: AuthenticAMD
cpu family\t: 26
"""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Gives this process another /proc/cpuinfo, and another answer of `platform.processor()`."""
    known = (environment.cpu_model, environment.cpu_family)

    def tell(cpuinfo: str, processor: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(cpuinfo, encoding="utf-8")
        monkeypatch.setattr(environment, "Path", lambda _: file)
        monkeypatch.setattr(platform, "processor", lambda: processor)
        for fact in known:
            fact.cache_clear()

    yield tell
    for fact in known:
        fact.cache_clear()


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "family"),
    [
        (ZEN4, "", ("AuthenticAMD", 25, 17)),
        ("", "AMD64 Family 26 Model 36 Stepping 0, AuthenticAMD", ("AuthenticAMD", 26, 36)),
        ("", "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", ("GenuineIntel", 6, 143)),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "aarch64", None),
        (ZEN4.replace("25", "?"), "", None),
        ("", "", None),
    ],
)
def test_the_processors_family(
    told: Callable[[str, str], None], cpuinfo: str, processor: str, family: tuple[str, int, int] | None
) -> None:
    told(cpuinfo, processor)
    assert environment.cpu_family() == family


def test_the_processors_name(told: Callable[[str, str], None]) -> None:
    told(ZEN4, "x86_64")
    assert environment.cpu_model() == "AMD EPYC"
