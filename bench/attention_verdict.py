"""Ratios of the attention benchmark's cells, held against what is claimed of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from optpass.bench.stats import Interval


@dataclass
class Judged:
    """What the cells came to: `low` and `high` bound a ratio that must stay at or below `limit`."""

    goal: str
    limit: float
    cells: list[tuple[str, float, Interval | None]] = field(default_factory=list)

    @property
    def passed(self) -> bool | None:
        """False where an interval is beyond the limit, True where all are within, None where some cannot tell."""
        if any(found is not None and found.low > self.limit for _, _, found in self.cells):
            return False
        return True if self.cells and all(f is not None and f.high <= self.limit for _, _, f in self.cells) else None

    @property
    def finding(self) -> str:
        """The worst cell in words."""
        if not self.cells:
            return f"{self.goal}: not measured"
        name, ratio, found = max(self.cells, key=lambda cell: cell[1])
        spread = f" [{found.low:.3f}, {found.high:.3f}]" if found else ""
        beyond = sum(f is not None and f.low > self.limit for _, _, f in self.cells)
        unclear = sum(f is None or f.low <= self.limit < f.high for _, _, f in self.cells)
        return (
            f"{self.goal}: worst {ratio:.3f}{spread} ({name}), limit {self.limit:.3f}, "
            f"of {len(self.cells)} cells {beyond} beyond it, {unclear} unclear"
        )
