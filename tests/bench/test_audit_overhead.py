"""The audit's overhead: what the verdict follows from, and one real sample of each part."""

from __future__ import annotations

import pytest

from optpass.bench import audit_overhead
from optpass.bench.audit_overhead import CASES, MODES, PARTS, SMALLEST, STEADY
from optpass.bench.registry import BenchConfig
from optpass.errors import ConfigError

Measured = dict[tuple[str, str, str], audit_overhead.Samples]


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
    for part, (_, _, goal) in PARTS.items():
        passed, finding = judged({part: goal + 0.02})
        assert passed is False and f"{part} {goal + 0.02:.3f}" in finding
    assert judged({}, complete=False)[0] is None


def test_the_smallest_program_is_told_and_not_judged() -> None:
    rows = audit_overhead._rows(measured({}), BenchConfig())
    assert rows[-1].extra["smallest program, ns added"] == pytest.approx(2000)


def test_sizes_are_checked_first() -> None:
    with pytest.raises(ConfigError, match="no size"):
        audit_overhead._chosen(BenchConfig(models=("mlp",), size="enormous"))


@pytest.mark.parametrize("part", ["compiling", "steady"])
def test_samples(part: str) -> None:
    samples = getattr(audit_overhead, part)(SMALLEST, "tiny", MODES[0], "eager", 2, "cpu", 0)
    assert set(samples) == set(CASES)
    assert all(len(taken) == 2 and min(taken) > 0 for taken in samples.values())
