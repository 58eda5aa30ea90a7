"""What a run has reached: its steps, how it ended, and the peak of a step with a budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from optpass.reporting.model import Report
from optpass.training.loop import StepEvent


@dataclass(frozen=True)
class MemoryOutcome:
    """The peak of a step with a budget, bytes, everything counted.

    Attributes:
        budget: what was asked for.
        predicted: by the backend, of what it compiled; by the plan ahead of time where the backend made none.
        measured: what the device's allocator counted in one step.
    """

    budget: int
    predicted: int
    measured: int

    @property
    def fits(self) -> bool:
        """The budget was held."""
        return self.measured <= self.budget

    def to_json(self) -> dict[str, int | bool]:
        """As `report.training` has it."""
        return {
            "budget_bytes": self.budget,
            "predicted_peak_bytes": self.predicted,
            "measured_peak_bytes": self.measured,
            "fits": self.fits,
        }


@dataclass
class Outcome:
    """What a run has reached; `status` is 'running' until it ends as 'done', 'interrupted' or 'failed'."""

    status: str = "running"
    steps: list[StepEvent] = field(default_factory=list)
    eager: list[StepEvent] = field(default_factory=list)
    validation_loss: float | None = None
    error: str | None = None
    report: Report = field(default_factory=Report)
    paths: tuple[Path, ...] = ()
    memory: MemoryOutcome | None = None

    def max_difference(self) -> tuple[float, int] | None:
        """The largest difference between a step's losses, and the first step that has it; None without a comparison."""
        pairs = zip(self.steps, self.eager, strict=False)
        return max(((abs(a.loss - b.loss), a.step) for a, b in pairs), key=lambda found: found[0], default=None)

    def holds(self, tolerance: float) -> bool | None:
        """Whether every step's losses agree within `tolerance`; None where nothing was compared."""
        worst = self.max_difference()
        return None if worst is None else worst[0] <= tolerance
