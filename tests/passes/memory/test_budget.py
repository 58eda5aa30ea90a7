"""From the option `memory_budget` to bytes: what it may be, and what a device allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optpass.errors import ConfigError
from optpass.options import Options, resolve
from optpass.passes import devices
from optpass.passes.memory.budget import budget_bytes
from optpass.units import parse_budget

H100 = devices.resolve("h100")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(123, 123), ("20GiB", 20 * 2**30), ("500MB", 500 * 10**6), (" 1.5 KiB ", 1536), ("77", 77)],
)
def test_sizes(value: int | str, expected: int) -> None:
    assert budget_bytes(Options(memory_budget=value), H100) == expected


def test_a_share_of_the_named_device() -> None:
    assert H100.memory_bytes is not None
    assert budget_bytes(Options(memory_budget="80%"), H100) == int(0.8 * H100.memory_bytes)
    assert budget_bytes(Options(memory_budget="100 %"), H100) == H100.memory_bytes
    assert budget_bytes(Options(), H100) is None


@pytest.mark.parametrize("value", [0, -1, "0", "0GiB", "20GX", "", "lots", "0%", "110%", "-5%", "-3GiB", 2.5, True])
def test_impossible_values_name_the_value_and_valid_forms(value: Any) -> None:
    for make in (lambda: resolve({"memory_budget": value}, environ={}), lambda: Options(memory_budget=value)):
        if isinstance(value, float | bool) and make.__code__.co_names[0] == "Options":
            continue  # pydantic's own error of a wrong type
        with pytest.raises(ConfigError) as caught:
            make()
        assert repr(value) in str(caught.value) and "'20GiB'" in str(caught.value) and "'80%'" in str(caught.value)


def test_the_layer_is_named() -> None:
    with pytest.raises(ConfigError, match="environment: OPTPASS_MEMORY_BUDGET='20GX'"):
        resolve({}, environ={"OPTPASS_MEMORY_BUDGET": "20GX"})
    with pytest.raises(ConfigError, match=r"command line: memory_budget='x'"):
        resolve({}, cli={"memory_budget": "x"}, environ={})


def test_a_share_needs_a_device() -> None:
    cpu = devices.resolve("cpu")
    for device in (None, cpu):
        with pytest.raises(ConfigError, match=r"memory_budget='80%'.* is not known.*'20GiB'"):
            budget_bytes(Options(memory_budget="80%"), device)


def test_a_share_of_this_machine_is_taken_where_it_is_named() -> None:
    spec = devices.resolve("cpu")
    cpu = replace(spec, memory_bytes=1000, sources={**spec.sources, "memory_bytes": "made up"})
    with pytest.raises(ConfigError, match="only where its processor is named"):
        budget_bytes(Options(memory_budget="80%"), cpu)
    assert budget_bytes(Options(memory_budget="80%", device="cpu"), cpu) == 800
    assert budget_bytes(Options(memory_budget=5000), cpu) == 5000  # nobody chose its memory as the measure


def test_more_than_the_device_has() -> None:
    with pytest.raises(ConfigError, match=r"memory_budget='81GiB'.* more than NVIDIA H100 SXM has \(80 GiB\).*'20GiB'"):
        budget_bytes(Options(memory_budget="81GiB"), H100)


def test_a_budget_is_part_of_the_options_that_identify_a_compile() -> None:
    from optpass.backend.identity import identity

    def of(**values: Any) -> str:
        return identity(Options(**values), [], "device")

    assert of(memory_budget="1GiB") == of(memory_budget="1GiB") != of(memory_budget="2GiB")
    assert of(memory_budget="1GiB") != of(memory_budget="1GiB", optimizer="adamw") != of()


def test_parse_budget_keeps_the_text() -> None:
    assert parse_budget("80%").text == "80%" and parse_budget("80%").amount is None
    assert parse_budget(7).share is None
