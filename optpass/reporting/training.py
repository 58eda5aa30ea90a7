"""The training record read back: curves and the figures said about them. What is not a finite number is left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optpass.units import format_seconds

_CURVES = ("steps", "eager_loss")


@dataclass(frozen=True)
class Training:
    """Curves of one run: (step, value) pairs; `eager` is the loss of the run without the compiler, if compared."""

    loss: tuple[tuple[float, float], ...]
    eager: tuple[tuple[float, float], ...]
    step_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]

    @property
    def largest_gap(self) -> float | None:
        """Largest |compiled - eager| loss over the steps that both have; None where none is in common."""
        eager = dict(self.eager)
        gaps = [abs(loss - eager[step]) for step, loss in self.loss if step in eager]
        return max(gaps, default=None)


def read_training(training: Mapping[str, Any]) -> Training:
    """`{"steps": [{step, loss, step_s, tokens_per_s}], "eager_loss": [...]}`; entry i of `eager_loss` is of step i."""
    raw = training.get("steps")
    steps = [entry for entry in raw if isinstance(entry, Mapping)] if isinstance(raw, list) else []
    numbered = [(float(index) if (n := _number(e.get("step"))) is None else n, e) for index, e in enumerate(steps)]
    raw_eager = training.get("eager_loss")
    eager = raw_eager if isinstance(raw_eager, list) else []
    return Training(
        loss=tuple((n, loss) for n, e in numbered if (loss := _number(e.get("loss"))) is not None),
        eager=tuple(
            (numbered[i][0] if i < len(numbered) else float(i), loss)
            for i, value in enumerate(eager)
            if (loss := _number(value)) is not None
        ),
        step_s=tuple(s for e in steps if (s := _number(e.get("step_s"))) is not None),
        tokens_per_s=tuple(t for e in steps if (t := _number(e.get("tokens_per_s"))) is not None),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def training_facts(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what is worth saying about a run; empty where nothing was recorded."""
    run = read_training(training)
    facts: list[tuple[str, str]] = []
    if run.loss:
        first, last = run.loss[0], run.loss[-1]
        facts.append(("steps", f"{len(run.loss)}"))
        facts.append(("loss", f"{first[1]:.4f} at step {first[0]:g} -> {last[1]:.4f} at step {last[0]:g}"))
    if run.step_s:
        facts.append(("step time", f"{format_seconds(statistics.median(run.step_s))} median"))
    if run.tokens_per_s:
        facts.append(("throughput", f"{statistics.median(run.tokens_per_s):,.0f} tokens/s median"))
    if run.largest_gap is not None:
        facts.append(("against eager", f"largest difference of the loss {run.largest_gap:.2g}"))
    return facts


def other_facts(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything recorded besides the curves, tables flattened to `config.model.width`; long lists by their length."""
    facts: list[tuple[str, str]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, list) and len(value) > 8:
            facts.append((name, f"{len(value)} values"))
        else:
            facts.append((name, str(value)))

    add("", {key: value for key, value in training.items() if key not in _CURVES})
    return facts
