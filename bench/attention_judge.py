"""Whether what a compiled model gave is right: beside a float64 run, and beside what eager mode gave of the same.

Knows nothing of how the runs were made; that is `attention_measure`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

#: Largest error relative to the largest element that is never called wrong, in float32.
TOLERANCE = 1e-5
#: Times eager's own error that is not called wrong: another order of summation, carried through whole models.
SLACK = 4.0

Values = dict[str, torch.Tensor]


@dataclass
class Case:
    """What one way of running a model gave; see the module."""

    sites: int = 0
    fused: int = 0
    graphs: int = 0
    declined: list[str] = field(default_factory=list)
    error: float | None = None
    eager_error: float = 0.0
    wrong: str = ""


def compared(case: Case, exact: Values | None, eager: Values, ours: Values) -> Case:
    """The largest error of `ours` and of `eager`; in words what is wrong, if anything."""
    reference = exact if exact is not None else eager
    if reference.keys() != ours.keys():
        case.wrong = f"{len(ours)} results instead of {len(reference)}"
        return case
    # The gradient of a bias of the keys is 0 in exact arithmetic: what is there is rounding, small beside the others.
    floor = 1e-2 * max((_largest(t) for n, t in reference.items() if n.startswith("grad")), default=0.0)
    for name, value in reference.items():
        least = floor if name.startswith("grad") else 0.0
        error, own = (_error(t[name], value, least) for t in (ours, eager))
        case.error, case.eager_error = max(case.error or 0.0, error), max(case.eager_error, own)
        if error > max(TOLERANCE, SLACK * own) and not case.wrong:
            case.wrong = f"{name}: error {error:.2g}, eager's {own:.2g}"
    return case


def _error(value: torch.Tensor, reference: torch.Tensor, least: float) -> float:
    """The largest difference over the largest element, or over `least` if that is more; infinite where only one is."""
    value, reference = value.double(), reference.double()
    if value.shape != reference.shape or not torch.equal(value.isfinite(), reference.isfinite()):
        return float("inf")
    kept = reference.isfinite()
    difference = (value - reference)[kept].abs()
    return float(difference.max()) / max(_largest(reference), least, 1e-30) if difference.numel() else 0.0


def _largest(value: torch.Tensor) -> float:
    kept = value[value.isfinite()]
    return float(kept.abs().max()) if kept.numel() else 0.0
