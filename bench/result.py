"""What a benchmark hands back: rows of samples with medians, ratios and verdicts, where and how they were taken.

Only data and its file form live here; measuring is `harness`, rendering is `table`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpass.bench.environment import Environment, checkout
from optpass.bench.stats import (
    Interval,
    Verdict,
    geometric_mean,
    median,
    median_interval,
    ratio_interval,
    ratio_of_medians,
    together,
    verdict,
)
from optpass.errors import OptPassError

SCHEMA: Final = "optpass.bench/1"


class BenchError(OptPassError):
    """A benchmark that could not run, or a result file that is none."""


class _Record(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="strings"
    )


class Row(_Record):
    """One case: its samples, and how it stands against the baseline of its group."""

    case: str = Field(description="What was measured, e.g. 'optpass'.")
    group: str = Field(default="", description="What it was measured on, e.g. 'gpt training'. One baseline a group.")
    unit: str = Field(default="s", description="Unit of median, interval and samples.")
    median: float | None = Field(default=None, description="Null where the row is a summary over groups.")
    ci_low: float | None = Field(default=None, description="95% bootstrap interval of the median; null below 5 rounds.")
    ci_high: float | None = None
    samples: tuple[float, ...] = Field(default=(), description="In order of the rounds; row i pairs with row i.")
    ratio: float | None = Field(default=None, description="Median over the baseline's; null for the baseline itself.")
    ratio_ci: tuple[float, float] | None = Field(default=None, description="95% bootstrap interval of the ratio.")
    verdict: Verdict | None = Field(default=None, description="Null for the baseline and where there is no ratio.")
    extra: dict[str, float | str] = Field(default_factory=dict, description="Further columns, units in the keys.")


class Result(_Record):
    """A benchmark's outcome; the file form is `to_json`."""

    schema_: Literal["optpass.bench/1"] = Field(default=SCHEMA, alias="schema")
    name: str = Field(description="Name as `optpass bench` takes it.")
    claim: str = Field(description="The one sentence that the benchmark puts to the test.")
    environment: Environment
    config: dict[str, Any] = Field(description="Everything that was chosen: models, size, rounds, tolerance, ...")
    rows: tuple[Row, ...]
    passed: bool | None = Field(description="Whether the claim holds; null where the measurement cannot tell.")
    finding: str = Field(default="", description="One line: the figure that decided `passed`, and the bound.")
    notes: tuple[str, ...] = Field(default=(), description="What a reader must know to judge the figures.")
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_json(self) -> str:
        """JSON text that `from_json` takes back."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def from_json(text: str, source: str = "result") -> Result:
    """A result from its JSON text; `BenchError` names `source` and the first thing wrong with it."""
    try:
        return Result.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise BenchError(f"{source}: not JSON: {error.msg} at line {error.lineno}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise BenchError(f"{source}: not an {SCHEMA} file: {place}: {first['msg']}") from None


def result_path(result: Result) -> Path | None:
    """Where a full run's result is kept: `bench/results/<kind>-<name>.json` of a checkout; None when installed.

    The kind of a processor has its vector instructions beside its name.
    """
    root = checkout()
    return root / "bench" / "results" / f"{slug(result.environment.kind)}-{result.name}.json" if root else None


def slug(text: str) -> str:
    """A device name as part of a file name: `slug("NVIDIA H200")` is `'nvidia-h200'`."""
    plain = re.sub(r"\((?:r|tm)\)", "", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"


def sample_rows(
    samples: Mapping[str, Sequence[float]], *, tolerance: float, seed: int = 0, group: str = "", unit: str = "s"
) -> list[Row]:
    """Rows of cases measured in the same rounds; the first is the baseline of the others."""
    rows: list[Row] = []
    names = list(samples)
    for name in names:
        own = tuple(samples[name])
        spread = median_interval(own, seed=seed)
        row = Row(
            case=name, group=group, unit=unit, samples=own, median=median(own),
            ci_low=spread.low if spread else None, ci_high=spread.high if spread else None,
        )  # fmt: skip
        if name != names[0]:
            base, shared = together(samples[names[0]], own)
            interval = ratio_interval(base, shared, seed=seed)
            row = row.model_copy(
                update={
                    "ratio": ratio_of_medians(base, shared),
                    "ratio_ci": _bounds(interval),
                    "verdict": verdict(interval, tolerance),
                }
            )
        rows.append(row)
    return rows


def mean_row(
    case: str, cells: Sequence[tuple[Sequence[float], Sequence[float]]], *, tolerance: float, seed: int, group: str
) -> Row:
    """The geometric mean of the ratios of several groups (`stats.geometric_mean`) as a row without samples."""
    value, interval = geometric_mean(cells, seed=seed)
    return Row(
        case=case, group=group, unit="ratio", ratio=value,
        ratio_ci=_bounds(interval), verdict=verdict(interval, tolerance),
    )  # fmt: skip


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    return (interval.low, interval.high) if interval else None
