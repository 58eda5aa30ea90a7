"""Rows and verdicts of the memory benchmark, from figures alone: whether budgets hold and are used, and what they cost.

Nothing here measures. Each part of the claim gets True, False, or None where its interval cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optpass.bench.memory_compile import INDUCTOR
from optpass.bench.memory_ways import EAGER_CHECKPOINT, FEWER, FLOOR, UNCONSTRAINED, beside
from optpass.bench.result import Row, sample_rows
from optpass.bench.stats import ratio_interval, ratio_of_medians
from optpass.units import format_bytes

USED, ERROR = 0.95, 0.005
#: Step times within this of each other count as the same.
SAME = 0.03
SLOWER_WITH_FEWER, COMPILE = 1.10, 1.6
#: The parts of the claim that one model's curves decide.
HELD, PREDICTED = "held and used", "predicted"
BESIDE = "no slower than PyTorch at its peaks"
AT_FEWER, AT_FLOOR = "at most 10% slower at 70% fewer activation bytes", "floor at most eager checkpointing's peak"
#: Most nodes of a joint graph, and the seconds that planning for it may take.
PLANNING = ((2_000, 5.0), (10_000, 30.0))

Way = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One part of the claim, with the figure that decided it."""

    part: str
    holds: bool | None
    text: str


def rows_of(model: str, ways: Mapping[str, Way], pytorch: Sequence[str], tolerance: float, seed: int) -> list[Row]:
    """Every way against optpass without a budget, and each of PyTorch's budgets against optpass at the same peak."""
    paired = {name for one in pytorch for name in (one, beside(one))}
    ways = {name: way for name, way in ways.items() if "failed" not in way}
    if UNCONSTRAINED not in ways:
        return []
    alone = [UNCONSTRAINED, *(n for n in ways if n not in paired and n != UNCONSTRAINED)]
    rows = _rows(f"{model}: curves", {name: ways[name] for name in alone}, tolerance, seed)
    for name in [n for n in pytorch if n in ways and beside(n) in ways]:
        pair = {name: ways[name], beside(name): ways[beside(name)]}
        rows += _rows(f"{model}: {name}", pair, tolerance, seed)
    return rows


def _rows(group: str, ways: Mapping[str, Way], tolerance: float, seed: int) -> list[Row]:
    if not all(way.get("samples") for way in ways.values()):
        return []
    rows = sample_rows({n: w["samples"] for n, w in ways.items()}, tolerance=tolerance, seed=seed, group=group)
    return [row.model_copy(update={"extra": _figures(ways[row.case])}) for row in rows]


def _figures(way: Way) -> dict[str, float | str]:
    found: dict[str, float | str] = {"peak MB": way["peak"] / 1e6}
    if "budget" in way:
        found |= {"predicted MB": way["predicted"] / 1e6, "error": way["predicted"] / way["peak"] - 1}
        if way["budget"] < 1 << 40:
            found |= {"budget MB": way["budget"] / 1e6}
    return found


def judge(model: str, ways: Mapping[str, Way], pytorch: Sequence[str], statics: int, seed: int) -> list[Verdict]:
    """The parts of the claim that one model's ways decide.

    Args:
        ways: as `memory_ways.measure` returns them.
        pytorch: the names of PyTorch's budgets among them.
        statics: bytes that are there throughout; budgets and predictions count them.
    """
    measured = {name: way for name, way in ways.items() if "failed" not in way}
    ours = {name: way for name, way in measured.items() if "budget" in way}
    parts: list[tuple[str, Sequence[str], Callable[[], Verdict]]] = [
        (HELD, [UNCONSTRAINED], lambda: _holds(model, ours, measured[UNCONSTRAINED], statics)),
        (PREDICTED, [UNCONSTRAINED], lambda: _predicted(model, ours, statics)),
        (BESIDE, [], lambda: _beside_pytorch(model, ways, pytorch, seed)),
        (AT_FEWER, [UNCONSTRAINED, FEWER], lambda: _fewer(model, measured, seed)),
        (AT_FLOOR, [FLOOR, EAGER_CHECKPOINT], lambda: _floor(model, measured)),
    ]
    verdicts = [
        draw() if all(name in measured for name in needed) else Verdict(part, None, f"{model}: not measured")
        for part, needed, draw in parts
    ]
    failed = {name: way["failed"] for name, way in ways.items() if "failed" in way}
    if failed:
        text = f"{model}: " + "; ".join(f"{name}: {why}" for name, why in failed.items())
        own = any(name.startswith("optpass") for name in failed)
        verdicts.append(Verdict("every way runs", False if own else None, text))
    return verdicts


def _holds(model: str, ours: Mapping[str, Way], unconstrained: Way, statics: int) -> Verdict:
    binding = {n: w for n, w in ours.items() if w["budget"] < unconstrained["peak"]}
    over = [n for n, w in binding.items() if w["peak"] > w["budget"]]
    used = {n: (statics + w["peak"]) / (statics + w["budget"]) for n, w in binding.items()}
    least = min(used, key=lambda n: used[n], default="")
    text = f"{model}: {len(binding) - len(over)} of {len(binding)} budgets hold"
    if not binding:
        return Verdict(HELD, None, text)
    text += f", least used {used[least]:.1%}" + (f"; over: {', '.join(over)}" if over else "")
    return Verdict(HELD, not over and used[least] >= USED, text)


def _predicted(model: str, ours: Mapping[str, Way], statics: int) -> Verdict:
    errors = {n: abs(w["predicted"] - w["peak"]) / (statics + w["peak"]) for n, w in ours.items()}
    worst = max(errors, key=lambda n: errors[n])
    text = f"{model}: largest error of a predicted peak {errors[worst]:.2%} ({worst})"
    return Verdict(PREDICTED, errors[worst] <= ERROR, text)


def _beside_pytorch(model: str, ways: Mapping[str, Way], pytorch: Sequence[str], seed: int) -> Verdict:
    verdicts: list[bool | None] = []
    texts = []
    for name in pytorch:
        own, base = ways.get(beside(name), {}), ways.get(name, {})
        if "peak" not in own or "peak" not in base:
            verdicts.append(None)
            texts.append(f"{name} not measured")
            continue
        if own.get("infeasible"):
            verdicts.append(False)
            texts.append(f"{name} unreached")
            continue
        held, text = _at_most(base.get("samples", ()), own.get("samples", ()), 1 + SAME, seed)
        verdicts.append(held)
        texts.append(f"{name} {text}")
    return Verdict(BESIDE, _all(verdicts), f"{model}: {', '.join(texts)}")


def _fewer(model: str, ways: Mapping[str, Way], seed: int) -> Verdict:
    own, base = ways[FEWER], ways[UNCONSTRAINED]
    if own.get("infeasible"):
        return Verdict(AT_FEWER, False, f"{model}: below the floor")
    held, text = _at_most(base.get("samples", ()), own.get("samples", ()), SLOWER_WITH_FEWER, seed)
    return Verdict(AT_FEWER, held, f"{model}: {text}")


def _floor(model: str, ways: Mapping[str, Way]) -> Verdict:
    ratio = ways[FLOOR]["peak"] / ways[EAGER_CHECKPOINT]["peak"]
    text = f"{model}: {ratio:.2f} of {format_bytes(ways[EAGER_CHECKPOINT]['peak'])}"
    return Verdict(AT_FLOOR, ratio <= 1, text)


def judge_compile(model: str, samples: Mapping[str, Sequence[float]], seed: int) -> Verdict:
    """Compile time with each budget, of plain Inductor's."""
    found = [(n, *_at_most(samples[INDUCTOR], own, COMPILE, seed)) for n, own in samples.items() if n != INDUCTOR]
    text = ", ".join(f"{name} {said}" for name, _, said in found)
    return Verdict(
        f"compile at most {COMPILE:g} times Inductor's", _all([held for _, held, _ in found]), f"{model}: {text}"
    )


def judge_planning(measured: Sequence[Mapping[str, float]]) -> Verdict:
    """Planning seconds, each held against the bound for graphs of about that size."""
    verdicts: list[bool | None] = []
    texts = []
    for found, (nodes, most) in zip(measured, PLANNING, strict=False):
        verdicts.append(found["seconds"] <= most * max(1.0, found["nodes"] / nodes))
        texts.append(f"{found['nodes']:.0f} nodes {found['seconds']:.1f} s (goal {most:g})")
    return Verdict("planning", _all(verdicts) if len(measured) == len(PLANNING) else None, ", ".join(texts))


def _at_most(base: Sequence[float], own: Sequence[float], most: float, seed: int) -> tuple[bool | None, str]:
    """Whether the interval of the ratio lies at or below `most`; None where it reaches across."""
    if not base or not own:
        return None, "not timed"
    ratio, interval = ratio_of_medians(base, own), ratio_interval(base, own, seed=seed)
    if interval is None:
        return None, f"{ratio:.2f}"
    held = True if interval.high <= most else False if interval.low > most else None
    return held, f"{ratio:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


def conclude(verdicts: Sequence[Verdict]) -> tuple[bool | None, str]:
    """The whole claim, and its parts in words."""
    words = {True: "holds", False: "FAILS", None: "undecided"}
    return _all([v.holds for v in verdicts]), "; ".join(f"{v.part}: {words[v.holds]} ({v.text})" for v in verdicts)
