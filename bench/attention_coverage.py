"""Claim: of the attentions that transformers' models write out, at least `GOAL` run on a fused kernel, and none wrong.

Every model type that a tiny model with random weights can be built of (`tiny_models`) is run in eager mode, where an
independent counter (`attention_sites`) says how many attentions it computes; and compiled with `backend="optpass"`,
`attention="always"`, in front of an inner that counts the calls of fused attention as the graphs run. Each is done in
inference and in training with active dropout, without and with a padding mask. In inference, and in training once more
with every dropout at 0, outputs and all gradients are compared with a float64 run. One process serves many models and
is replaced when it dies or hangs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from optpass.bench.environment import environment
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, Row
from optpass.bench.worker import Worker
from optpass.errors import ConfigError, did_you_mean

GOAL = 0.95
CLAIM = f"At least {GOAL:.0%} of the attentions in transformers' models run on a fused kernel, and no result is wrong."

CASES = ("inference", "inference, padding", "training", "training, padding")
QUICK = ("bert", "gpt2", "llama", "t5", "gemma2", "gpt_oss", "swin", "bloom")
TIMEOUT_S = 240.0
TOTAL = "all"
ALL_CASES = "all cases"
#: A defect: every site that is not fused is to be listed with its reason.
NO_REASON = "no reason was given"
_LATE = "the time was over"
_ENVIRON = {"OMP_NUM_THREADS": "1"}

Measured = dict[str, Any]


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the model types and judge the claim by the share over all sites of all cases.

    Raises:
        ConfigError: an unknown model type, or transformers is missing.
    """
    chosen = _chosen(config)
    place = environment("cpu")
    progress.start(len(chosen))
    measured: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    begun = time.monotonic()
    with Worker("optpass.bench.attention_measure:measure", environ=_ENVIRON, timeout_s=TIMEOUT_S) as worker:
        for name in chosen:
            if config.budget_s is not None and time.monotonic() - begun > config.budget_s:
                failed[name] = _LATE
                continue
            progress.step(name)
            try:
                measured[name] = worker.call(model_type=name, seed=config.seed)
            except BenchError as error:
                failed[name] = str(error)
            progress.step(name, 1)
    rows = [row for name, found in measured.items() for row in _rows(name, found)]
    totals = _totals(rows)
    complete = config.full and _LATE not in failed.values()
    passed, finding = _judge(totals, rows, complete=complete)
    return Result(
        name="attention_coverage",
        claim=CLAIM,
        environment=place.finished(),
        config=asdict(config) | {"model types": len(chosen), "goal": GOAL},
        rows=(*_condensed(rows), *totals),
        passed=passed,
        finding=finding,
        notes=tuple(_notes(measured, failed)),
    )


def model_names() -> Sequence[str]:
    """What `BenchConfig.models` may name: the model types of transformers.

    Raises:
        ConfigError: transformers is missing.
    """
    from optpass.bench.tiny_models import model_types

    try:
        return model_types()
    except ImportError as error:
        raise ConfigError(f"attention_coverage needs transformers ({error}); pip install 'optpass[hf]'") from None


def _chosen(config: BenchConfig) -> Sequence[str]:
    """Model types, checked before anything runs."""
    known = model_names()
    chosen = config.models or (QUICK if config.quick else known)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--models: transformers has no model type {name!r}; {did_you_mean(name, known)}")
    return chosen


def _rows(name: str, found: Measured) -> Iterator[Row]:
    for case, one in found["cases"].items():
        extra: dict[str, float | str] = {"sites": float(one["sites"]), "fused": float(one["fused"])}
        if one.get("error") is not None:
            extra |= {"error": one["error"], "eager's": one["eager_error"]}
        why = [f"{n}x {reason}" if n > 1 else reason for reason, n in Counter(one["declined"]).items()]
        silent = one["sites"] - one["fused"] - len(one["declined"])
        why += [f"{silent}x {NO_REASON}"] if silent > 0 else []
        extra |= {"graphs": float(one["graphs"]), "wrong": one["wrong"], "why not": "; ".join(why)}
        share = one["fused"] / one["sites"] if one["sites"] else None
        yield Row(case=case, group=name, unit="", median=share, extra=extra)


def _condensed(rows: Sequence[Row]) -> Iterator[Row]:
    """One row for a model whose sites are all fused, and rightly, in every case; else its rows as they are."""
    for name in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == name]
        if any((row.median is not None and row.median < 1.0) or row.extra["wrong"] for row in own):
            yield from own
            continue
        extra: dict[str, float | str] = {k: sum(float(r.extra[k]) for r in own) for k in ("sites", "fused", "graphs")}
        for key in ("error", "eager's"):
            extra[key] = max((float(row.extra[key]) for row in own if key in row.extra), default=0.0)
        yield Row(case=ALL_CASES, group=name, unit="", median=1.0 if extra["sites"] else None, extra=extra)


def _totals(rows: Sequence[Row]) -> list[Row]:
    """Sites and fused ones by case, and over all."""
    totals = []
    for case in (*CASES, TOTAL):
        own = [row for row in rows if case in (row.case, TOTAL)]
        sites, fused = (sum(float(row.extra[key]) for row in own) for key in ("sites", "fused"))
        if sites:
            extra: dict[str, float | str] = {"sites": sites, "fused": fused}
            totals.append(Row(case=case, group=TOTAL, unit="", median=fused / sites, extra=extra))
    return totals


def _judge(totals: Sequence[Row], rows: Sequence[Row], *, complete: bool) -> tuple[bool | None, str]:
    """Holds when the share over all is at least the goal and nothing is wrong; a part of the models decides nothing."""
    if not totals:
        return None, "no model was measured"
    total = totals[-1]
    wrong = sorted({f"{row.group} ({row.case})" for row in rows if row.extra["wrong"]})
    share = total.median or 0.0
    text = f"{total.extra['fused']:.0f} of {total.extra['sites']:.0f} sites ({share:.1%}), goal {GOAL:.0%}"
    text += f"; wrong: {', '.join(wrong)}" if wrong else "; nothing wrong"
    if wrong:
        return False, text
    return (share >= GOAL if complete else None), text


def _notes(measured: Mapping[str, Measured], failed: Mapping[str, str]) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    for found in measured.values():
        for one in found["cases"].values():
            reasons.update(reason.partition(" at ")[0] for reason in one["declined"])
    yield "sites are counted in an eager run, fused calls as the compiled graphs run"
    yield "calls that the model makes of a fused kernel itself count in neither"
    silent = sorted(
        {name for name, found in measured.items() for row in _rows(name, found) if NO_REASON in str(row.extra)}
    )
    if silent:
        yield f"{NO_REASON}: {', '.join(silent)}"
    for reason, count in reasons.most_common():
        yield f"declined {count}x: {reason}"
    for name, found in measured.items():
        for case, error in found["skipped"].items():
            yield f"not measured: {name} ({case}): {error[:160]}"
    for name, error in failed.items():
        yield f"not measured: {name}: {error[:160]}"
