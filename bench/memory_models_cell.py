"""One cell of `memory_models`: a model's training step at budgets from its floor to its unconstrained peak.

Everything is run and measured in this process, which must be fresh; every budget gets a model of its own, so that
nothing that was seen of another one's step is known. Verdicts are `memory_models_judge`'s; nothing here knows a claim.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from optpass.bench import memory_journal
from optpass.bench.memory_models_program import Program, difference, planned

#: A budget that no step fits, and the part of the floor that is asked for to see it refused.
NOTHING, BELOW = 1, 0.97
#: Steps in which plans may change by what was seen, at most.
SETTLING = 4

Point = dict[str, Any]


def measure(
    model: str, size: str, overrides: Mapping[str, Any], inner: str, outside: bool, micro: int, optimizer: str,
    budgets: int, seed: int, journal: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The step without a budget, what the floor is said to be, the step at `budgets` budgets, and one below the floor.

    Args:
        outside: the loss is computed by eager code, and not in the graph.
        micro: micro-batches of a step, whose gradients add up.
        optimizer: name of the one that steps behind them, as the option `optimizer` has it; "none" for none.
        budgets: evenly spaced from the floor, which is the first, to the unconstrained peak, which is none of them.
        journal: where to write what was found so far.

    Returns:
        `top`: bytes of the unconstrained step, everything counted. `named`: the floor as it was named before anything
        ran; `floor`: that of the step as it was seen. `points`: see `_Cell.point`. `refused`: the floor that was named
        by the error at a budget below the floor; None where there was none. `seconds`: wall time of each part. `micro`.
    """
    program = (model, size, dict(overrides), outside, micro, optimizer, seed)
    cell = _Cell(Program(*program), inner, budgets, journal)
    cell.run()
    return cell.found


class _Cell:
    """The budgets of one program, and what was found at each."""

    def __init__(self, program: Program, inner: str, budgets: int, journal: str | None) -> None:
        self.program, self.inner, self.budgets, self.journal = program, inner, budgets, journal
        self.found: dict[str, Any] = {"micro": program.micro, "points": [], "seconds": {}}

    def run(self) -> None:
        """All of them, the floor first."""
        self._timed("unconstrained", self._unconstrained)
        self._timed("floor", self._floor)
        floor, top = self.found["floor"], self.found["top"]
        for number in range(1, self.budgets):
            budget = floor + (top - floor) * number // self.budgets
            self._timed(f"budget {number}", lambda budget=budget: self.found["points"].append(self.point(budget)))
        self._timed("below the floor", self._below)
        memory_journal.write(self.journal, "done", self.found)

    def _timed(self, label: str, part: Any) -> None:
        memory_journal.write(self.journal, label, self.found)
        begun = time.monotonic()
        part()
        self.found["seconds"][label] = round(time.monotonic() - begun, 1)

    def _unconstrained(self) -> None:
        self.program.start(self.inner, None)
        self.reference = self.program.seeded()
        self.found["top"] = self.program.peak()

    def _floor(self) -> None:
        """The floor that is named; and where the step needs more once it was seen, that."""
        named = self.refused(NOTHING)
        assert named is not None  # nothing fits one byte
        self.found |= {"named": named, "floor": named}
        for _ in range(SETTLING):
            point = self.point(self.found["floor"])
            if "infeasible" not in point:
                break
            self.found["floor"] = point["infeasible"]
        self.found["points"].append(point)

    def _below(self) -> None:
        refused = self.refused(int(self.found["floor"] * BELOW))
        self.found["refused"] = refused

    def refused(self, budget: int) -> int | None:
        """The floor that the error names at a budget; None where the steps run."""
        from optpass.errors import BudgetInfeasibleError

        self.program.start(self.inner, budget)
        try:
            for _ in range(SETTLING):
                self.program.step()
                self.program.clear()
        except BudgetInfeasibleError as error:
            return error.floor_bytes
        return None

    def point(self, budget: int) -> Point:
        """The step at one budget, as it was planned at first and as it is planned once it was seen.

        Returns:
            `budget`; of the first step `first_predicted`, and `first`, its peak, measured when the step is run again as
            it was compiled (None where that has changed before it was over); of the last one `peak` and `predicted`;
            `slowdown` as predicted; `gap`: the report names what the next plan needs; `error`: largest relative error
            of a value or a gradient; `rng`: the generator's state is the unconstrained step's; `plans`: how many there
            were. Only `budget` and `infeasible`, the floor named, where plans do not fit together; else `failed`.
        """
        from optpass.errors import BudgetInfeasibleError

        self.program.start(self.inner, budget)
        try:
            return {"budget": budget} | self._settled()
        except BudgetInfeasibleError as error:
            return {"budget": budget, "infeasible": error.floor_bytes}
        except Exception as error:  # noqa: BLE001  # whatever it was: the verdict names it
            return {"budget": budget, "failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}

    def _settled(self) -> Point:
        from optpass.backend.memory.together.together import STEPS

        program = self.program
        seen = [program.seeded()]
        first, peak, first_peak = seen[0].planned, None, None
        if program.micro == 1:
            STEPS.forget()  # else the plan may be another one before it was measured
            peak = first_peak = program.peak()
        for _ in range(SETTLING):
            before = planned()["plans"]
            seen.append(program.again())
            if planned()["plans"] == before:
                break
        last = planned()
        if peak is None or last["plans"] > first["plans"]:
            peak = program.peak()
        if last["plans"] == first["plans"]:
            first_peak = peak
        return {
            "first": first_peak,
            "first_predicted": first["predicted"],
            "peak": peak,
            "error": max(difference(self.reference, one) for one in seen),
            "rng": all(one.rng == self.reference.rng for one in seen),
            **last,
        }
