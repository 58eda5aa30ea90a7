"""The least recomputation that fits a budget, exactly: an integer program for small graphs, solved by HiGHS.

In the manner of Checkmate (Jain et al., MLSys 2020), with one stage per operation of the backward, in its fixed order:
what is carried from stage to stage, and what is computed again in it. The memory is that of `Schedule`: a value is
freed at its last use. Inside a stage, what is computed again is computed in the forward's order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from optpass.passes.memory.search.schedule import Schedule


@dataclass(frozen=True)
class Optimum:
    """The optimum.

    Attributes:
        seconds: of recomputation, of the best plan that was found.
        bound: no plan recomputes less.
        proven: the solver has proven it.
    """

    seconds: float
    bound: float
    proven: bool


def optimum(schedule: Schedule, budget: int, limit_s: float = 20.0) -> Optimum | None:
    """The cheapest plan whose peak is at most `budget` bytes above the statics; None where there is none."""
    return _Program(schedule, budget).solve(limit_s)


class _Program:
    def __init__(self, schedule: Schedule, budget: int) -> None:
        self.schedule, self.budget = schedule, budget
        self.operations = schedule.operations
        self.sizes = [int(s) for s in schedule.sizes]
        self.stages = len(schedule.anchors)
        self.again = [o.index for o in self.operations if not o.backward and not (o.kept_why and o.forward)]
        producer = schedule._producer
        self.free = [
            s
            for s in range(len(self.sizes))
            if producer[s] >= 0 and not self.operations[producer[s]].backward and s not in schedule._held
        ]
        self.carried = {(t, s): i for i, (t, s) in enumerate((t, s) for t in range(self.stages) for s in self.free)}
        base = len(self.carried)
        self.rerun = {
            (t, o): base + i for i, (t, o) in enumerate((t, o) for t in range(self.stages) for o in self.again)
        }
        base += len(self.rerun)
        self.readers = {s: [o for o in self.again if s in schedule._inputs[o]] for s in self.free}
        # Inside a stage `s` is live or not between two operations that touch it; gap 0 is before it is made.
        gaps = ((t, s, g) for t in range(self.stages) for s in self.free for g in range(len(self.readers[s]) + 2))
        self.live = {key: base + i for i, key in enumerate(gaps)}
        self.count = base + len(self.live)
        self.rows: list[tuple[dict[int, float], float]] = []  # sums of coefficients that are at most the bound
        self.fixed = self._fixed()

    def _fixed(self) -> np.ndarray:
        """Bytes of what is never computed again, live when each stage's operation runs, its own outputs included."""
        schedule = self.schedule
        born = dict.fromkeys(schedule.tangents, 0)
        last = dict.fromkeys(schedule.tangents, self.stages - 1 if schedule.problem.tangents_held else -1)
        for t, anchor in enumerate(schedule.anchors):
            for s in self.operations[anchor].outputs:
                born[s] = last[s] = t
            for s in schedule._inputs[anchor]:
                if s in born:
                    last[s] = max(last[s], t)
        live = np.full(self.stages, sum(self.sizes[s] for s in schedule._held), dtype=float)
        self.made = np.zeros(self.stages)
        for s, start in born.items():
            live[start : last[s] + 1] += self.sizes[s]
            if s not in schedule.tangents:
                self.made[start] += self.sizes[s]
        return live

    def _add(self, terms: dict[int, float], most: float) -> None:
        self.rows.append((terms, most))

    def _is_free(self, s: int) -> bool:
        return (0, s) in self.carried

    def _at_hand(self, t: int, s: int) -> dict[int, float]:
        """Terms of: `s` can be read in stage `t`."""
        terms = {self.carried[t, s]: 1.0}
        producer = self.schedule._producer[s]
        if (t, producer) in self.rerun:
            terms[self.rerun[t, producer]] = 1.0
        return terms

    def _dependences(self) -> None:
        for t, anchor in enumerate(self.schedule.anchors):
            for s in self.schedule._inputs[anchor]:
                if self._is_free(s):
                    self._add({i: -c for i, c in self._at_hand(t, s).items()}, -1.0)
            for o in self.again:
                for s in self.schedule._inputs[o]:
                    if self._is_free(s):
                        self._add({self.rerun[t, o]: 1.0} | {i: -c for i, c in self._at_hand(t, s).items()}, 0.0)
            if t + 1 < self.stages:
                for s in self.free:
                    self._add(
                        {self.carried[t + 1, s]: 1.0} | {i: -c for i, c in self._at_hand(t, s).items()}, 0.0
                    )  # fmt: skip

    def _memory(self) -> None:
        for t, anchor in enumerate(self.schedule.anchors):
            read = set(self.schedule._inputs[anchor])
            own = self.fixed[t] + self.operations[anchor].workspace
            own += sum(self.sizes[s] for s in read if self._is_free(s))
            last = t + 1 == self.stages
            later = {self.carried[t + 1, s]: self.sizes[s] for s in self.free if s not in read and not last}
            self._add(dict(later), self.budget - own)
            for s in self.free:
                self._liveness(t, s, s in read)
            for o in self.again:
                self._memory_again(t, o)

    def _liveness(self, t: int, s: int, read: bool) -> None:
        """`s` is live in a gap of stage `t` if it is at hand there and something reads it behind."""
        producer = self.schedule._producer[s]
        for gap in range(len(self.readers[s]) + 2):
            live = {self.live[t, s, gap]: -1.0}
            for source in [self.carried[t, s], self.rerun.get((t, producer)) if gap else None]:
                if source is None:
                    continue
                if read:
                    self._add(live | {source: 1.0}, 0.0)
                    continue
                if t + 1 < self.stages:
                    self._add(live | {source: 1.0, self.carried[t + 1, s]: 1.0}, 1.0)
                for reader in self.readers[s][max(gap - 1, 0) :]:
                    self._add(live | {source: 1.0, self.rerun[t, reader]: 1.0}, 1.0)

    def _gap(self, s: int, o: int) -> int:
        return bisect_right([self.schedule._producer[s], *self.readers[s]], o)

    def _memory_again(self, t: int, o: int) -> None:
        operation = self.operations[o]
        touched = {*self.schedule._inputs[o], *operation.outputs}
        own = self.fixed[t] - self.made[t] + operation.workspace
        own += sum(self.sizes[s] for s in touched if self._is_free(s))
        terms = {self.live[t, s, self._gap(s, o)]: float(self.sizes[s]) for s in self.free if s not in touched}
        slack = max(0.0, sum(terms.values()) + own - self.budget)  # the row says nothing where `o` is not run
        if own > self.budget:
            self._add({self.rerun[t, o]: 1.0}, 0.0)
        elif slack:
            self._add(terms | {self.rerun[t, o]: slack}, self.budget - own + slack)

    def _kept(self) -> None:
        """What is kept from the forward: it must have been made there, and it lives on there."""
        schedule = self.schedule
        kept = {s: self.carried[0, s] for s in self.free}
        for s, variable in kept.items():
            if s not in schedule._forward_made:
                self._add({variable: 1.0}, 0.0)
        for i, bare in enumerate(schedule._bare):
            terms = {v: float(self.sizes[s]) for s, v in kept.items() if schedule.forward_last.get(s, i) < i}
            self._add(terms, self.budget - float(bare))
        outputs = sum(self.sizes[s] for s in (*schedule._held, *schedule.tangents)) + schedule.problem.tail
        self._add({v: float(self.sizes[s]) for s, v in kept.items()}, self.budget - outputs)

    def solve(self, limit_s: float) -> Optimum | None:
        self._dependences()
        self._memory()
        self._kept()
        cost = np.zeros(self.count)
        for (_, o), variable in self.rerun.items():
            cost[variable] = self.operations[o].seconds
        unit = max(cost.max(), 1e-12)
        whole = np.ones(self.count)
        whole[list(self.live.values())] = 0
        found = milp(
            cost / unit, constraints=self._matrix(), bounds=Bounds(0, 1), integrality=whole,
            options={"time_limit": limit_s, "mip_rel_gap": 0.01},
        )  # fmt: skip
        if found.status == 2:
            return None
        if found.x is None:
            raise TimeoutError(f"no solution of {self.count} variables within {limit_s} s")
        return Optimum(found.fun * unit, found.mip_dual_bound * unit, found.status == 0)

    def _matrix(self) -> LinearConstraint:
        rows, columns, values, most = [], [], [], []
        for row, (terms, bound) in enumerate(self.rows):
            scale = max((abs(v) for v in terms.values()), default=1.0) or 1.0
            for column, value in terms.items():
                rows.append(row)
                columns.append(column)
                values.append(value / scale)
            most.append(bound / scale)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), self.count))
        return LinearConstraint(matrix.tocsc(), ub=np.array(most))
