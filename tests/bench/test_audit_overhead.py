"""The audit's overhead: what the verdict follows from, and one real sample of each part."""

from __future__ import annotations

import time

import pytest

from optpass.bench import audit_overhead, audit_overhead_samples
from optpass.bench.audit_overhead import PARTS, STEADY
from optpass.bench.audit_overhead_samples import CASES, MODES, SMALLEST, Samples
from optpass.bench.registry import BenchConfig
from optpass.errors import ConfigError

Measured = dict[tuple[str, str, str], Samples]


def measured(ratios: dict[str, float]) -> Measured:
    """Ten rounds of two programs per part, the audited case slower by a ratio, with a little noise."""
    found: Measured = {}
    for part in PARTS:
        for model in ("one", "two"):
            base = [1.0 + 0.001 * (i % 3) for i in range(10)]
            factors = {"plain": 1.0, "audited": ratios.get(part, 1.0), "plain again": 1.0}
            found[part, model, MODES[0]] = {case: [factors[case] * value for value in base] for case in CASES}
    found[STEADY, SMALLEST, MODES[0]] = {"plain": [1e-5] * 10, "audited": [1.2e-5] * 10, "plain again": [1e-5] * 10}
    return found


def judged(ratios: dict[str, float], *, complete: bool = True) -> tuple[bool | None, str]:
    return audit_overhead._judge(audit_overhead._rows(measured(ratios), BenchConfig()), complete=complete)


def test_every_part_must_be_within_its_goal() -> None:
    assert judged({})[0] is True
    for part, known in PARTS.items():
        passed, finding = judged({part: known.goal + 0.02})
        assert passed is False and f"{part} {known.goal + 0.02:.3f}" in finding
    assert judged({}, complete=False)[0] is None


def test_the_smallest_program_is_told_and_not_judged() -> None:
    rows = audit_overhead._rows(measured({}), BenchConfig())
    (told,) = [row for row in rows if row.extra]
    assert told.case == f"{STEADY}: audited"
    assert told.extra["smallest program, ns added"] == pytest.approx(2000)


def test_sizes_are_checked_first() -> None:
    with pytest.raises(ConfigError, match="no size"):
        audit_overhead._chosen(BenchConfig(models=("mlp",), size="enormous"))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["compiling", "steady"])
def test_samples(part: str) -> None:
    taken = getattr(audit_overhead_samples, part)(SMALLEST, "tiny", MODES[:1], "eager", 2, 60.0, "cpu", 0)
    (samples,) = taken.values()
    assert set(taken) == set(MODES[:1]) and set(samples) == set(CASES)
    assert all(len(values) == 2 and min(values) > 0 for values in samples.values())


def test_rounds_end_with_the_time() -> None:
    taken = audit_overhead_samples._interleaved(lambda audited: 1.0, 100, 0, until=0.0)
    assert all(len(values) == 2 for values in taken.values())


def test_shares_of_the_budget() -> None:
    parts = [part for part in PARTS for _ in range(2)]
    begun = time.monotonic()
    shares = [audit_overhead._seconds(part, parts[index:], begun, 100.0) for index, part in enumerate(parts)]
    assert shares[0] == pytest.approx(100 * next(iter(PARTS.values())).share / 2, abs=1)
    assert shares[-1] == pytest.approx(100, abs=1)  # nothing was used before: all of it is left
