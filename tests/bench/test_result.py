"""Results: JSON form and back, validation, the table, and what the environment holds."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import jsonschema
import pytest

from optpass.bench.environment import Environment, checkout, environment
from optpass.bench.result import BenchError, Result, Row, from_json, mean_row, result_path, sample_rows, slug
from optpass.bench.table import plain, show


def _environment() -> Environment:
    return Environment(
        device="AMD EPYC 7B13", device_kind="cpu", cpu="AMD EPYC 7B13", cores=2, os="Linux x86_64", python="3.11.2",
        torch="2.13.0", optpass="0.1.0", threads=2, load_before=0.1, load_after=1.2,
    )  # fmt: skip


def _result(passed: bool | None = True) -> Result:
    samples = {"inductor": (1.0, 1.1, 0.9, 1.0, 1.05), "optpass": (1.02, 1.1, 0.93, 1.0, 1.06)}
    rows = sample_rows(samples, tolerance=0.03, group="gpt")
    pairs = [(samples["inductor"], samples["optpass"])] * 3
    rows.append(mean_row("optpass", pairs, tolerance=0.03, seed=0, group="all"))
    return Result(
        name="demo", claim="It is quick.", environment=_environment(), config={"rounds": 5}, rows=tuple(rows),
        passed=passed, finding="ratio 1.0, goal 1.05", notes=("a note",),
    )  # fmt: skip


def test_what_is_not_finite_can_be_read_again() -> None:
    row = Row(case="a", median=float("inf"), extra={"error": float("inf")})
    text = _result().model_copy(update={"rows": (row,)}).to_json()
    (found,) = from_json(text).rows
    assert found.median == float("inf") and found.extra == {"error": "Infinity"}


@pytest.mark.parametrize("passed", [True, False, None])
def test_json_comes_back_equal_and_fits_the_schema(passed: bool | None) -> None:
    result = _result(passed)
    text = result.to_json()
    assert from_json(text) == result
    data = json.loads(text)
    jsonschema.validate(data, Result.model_json_schema(by_alias=True, mode="serialization"))
    assert data["schema"] == "optpass.bench/1" and data["passed"] is passed
    first, second, summary = data["rows"]
    assert first["samples"] == [1.0, 1.1, 0.9, 1.0, 1.05] and first["median"] == 1.0 and first["ratio"] is None
    assert second["ci_low"] <= second["median"] <= second["ci_high"]
    assert second["ratio_ci"][0] <= second["ratio"] <= second["ratio_ci"][1]
    assert summary["median"] is None and summary["ratio_ci"] is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file.json: not JSON"),
        ("{}", "file.json: not an optpass.bench/1 file: "),
        (_result().to_json().replace('"verdict": "UNCLEAR"', '"verdict": "GREAT"', 1), "rows"),
        (_result().to_json().replace('"passed"', '"past"', 1), "passed"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(BenchError) as caught:
        from_json(text, "file.json")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_table_without_a_terminal_is_plain_text() -> None:
    out = io.StringIO()
    show(_result(False), out)
    text = out.getvalue()
    assert text.isascii() and "\x1b" not in text
    assert "FAILED: ratio 1.0, goal 1.05" in text and "note: a note" in text
    assert "AMD EPYC 7B13, 2 cores" in text and "load 0.1 before, 1.2 after" in text
    header = next(line for line in text.splitlines() if line.startswith("measured on"))
    assert header.split()[:3] == ["measured", "on", "case"]


def test_empty_columns_are_left_out_and_extra_ones_shown() -> None:
    rows = (Row(case="a", median=0.0012, extra={"error": "3%", "n": 2.0}),)
    out = io.StringIO()
    show(_result().model_copy(update={"rows": rows}), out)
    line = next(line for line in out.getvalue().splitlines() if line.startswith("a "))
    assert line.split() == ["a", "1.2", "ms", "3%", "2"]
    assert "verdict" not in out.getvalue()


def test_columns_line_up() -> None:
    lines = plain(["name", "x"], [["long name", "1.5"], ["b", "10"]]).splitlines()
    assert lines == ["name         x", "---------  ---", "long name  1.5", "b           10"]


def test_the_environment_names_no_place() -> None:
    found = environment("cpu").finished()
    assert found.cores >= 1 and found.threads >= 1 and found.torch and found.cpu
    text = found.model_dump_json()
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert str(Path.cwd()) not in text and os.uname().nodename not in (found.cpu, found.device, found.os)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-cpu-2-20ghz"),
        ("/../..", "unknown"),
    ],
)
def test_device_names_become_file_names(name: str, part: str) -> None:
    assert slug(name) == part


def test_a_result_is_kept_in_the_checkout() -> None:
    path = result_path(_result())
    assert checkout() is not None and path is not None
    assert path.parts[-3:] == ("bench", "results", "amd-epyc-7b13-demo.json")
    place = _environment().model_copy(update={"instructions": "AVX512 bfloat16"})
    path = result_path(_result().model_copy(update={"environment": place}))
    assert path is not None and path.name == "amd-epyc-7b13-avx512-bfloat16-demo.json"
