"""The ways to run one training step whose peaks and times are compared, measured side by side in one process.

optpass at a list of budgets, PyTorch's `activation_memory_budget` under its own compiler, and checkpointing of every
block by `torch.utils.checkpoint`. Verdicts are `memory_judge`'s; nothing here knows a claim.
"""

from __future__ import annotations

import contextlib
import gc
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optpass.bench import memory_journal
from optpass.bench.clocks import clock
from optpass.bench.harness import schedule
from optpass.bench.stats import MIN_ROUNDS

UNCONSTRAINED, FLOOR, FEWER = "optpass unconstrained", "optpass floor", "optpass, 70% fewer activation bytes"
EAGER, EAGER_CHECKPOINT, COMPILED_CHECKPOINT = "eager", "eager, checkpointed", "compiled, checkpointed"
#: Bytes above those that the step leaves behind (its gradients), of the unconstrained step's.
FEWER_LEFT = 0.3
#: A budget that nothing reaches.
_ENDLESS = 1 << 50
#: Peaks within this part of each other are one: two ways to it are not measured twice.
ONE_PEAK = 0.002

Way = dict[str, Any]


@dataclass
class _Run:
    """One way: its step, and what was found of it."""

    step: Callable[[], Any]
    found: Way = field(default_factory=dict)


def pytorch(ratio: float) -> str:
    """The name of PyTorch's budget of that ratio."""
    return f"PyTorch {ratio:g}"


def beside(name: str) -> str:
    """The name of optpass at the peak that the way `name` reaches."""
    return f"optpass at the peak of {name}"


def measure(
    model: str, size: str, overrides: Mapping[str, Any], inner: str, ratios: Sequence[float],
    fractions: Sequence[float], rounds: int, seed: int, budget_s: float, journal: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Every way of a model on the CPU, in this process, which must be fresh.

    Args:
        ratios: PyTorch's budgets.
        fractions: optpass's, as parts of the way from its floor to its unconstrained peak.
        rounds: samples of each way's time; 0 for peaks alone.
        budget_s: wall seconds after which no new round of times begins, once there are enough for an interval.
        journal: where to write what was found so far.

    Returns:
        `statics`: bytes of parameters, buffers and inputs. `ways`: by name, `peak` and `left` (bytes above what was
        there before the step), `samples` (processor seconds of a step, by round), and for optpass `budget` and
        `predicted` (bytes, in the same sense as `peak`); a way that could not be run has `failed` alone. `same`: ways
        whose peak another way has too, by its name: their figures are that way's.
    """
    bench = _Bench(model, size, overrides, inner, seed, journal)
    bench.attempt(EAGER, bench.make, bench.eager, False)
    bench.attempt(EAGER_CHECKPOINT, bench.make, bench.eager, True)
    bench.attempt(UNCONSTRAINED, bench.optpass, None)
    bench.attempt(FLOOR, bench.optpass, 0)
    bench.attempt(COMPILED_CHECKPOINT, bench.make, bench.checkpointed)
    for ratio in ratios:
        bench.attempt(pytorch(ratio), bench.make, bench.pytorch, ratio)
    top, bottom = bench.found(UNCONSTRAINED), bench.found(FLOOR)
    if top and bottom:
        bench.attempt(FEWER, bench.optpass, _fewer(top))
        for part in fractions:
            above = int(bottom["peak"] + part * (top["peak"] - bottom["peak"]))
            bench.attempt(f"optpass {part:g}", bench.optpass, above)
        for ratio in ratios:
            bench.beside(pytorch(ratio))
    bench.time(rounds, budget_s)
    return bench.answer()


def _fewer(top: Way) -> int:
    return int(top["left"] + FEWER_LEFT * (top["peak"] - top["left"]))


class _Bench:
    """One model and the ways to run it."""

    def __init__(
        self, model: str, size: str, overrides: Mapping[str, Any], inner: str, seed: int, journal: str | None
    ) -> None:
        from optpass.backend.memory.measure import storage_bytes

        self.model, self.size, self.overrides, self.inner, self.seed = model, size, dict(overrides), inner, seed
        self.journal = journal
        self.runs: dict[str, _Run] = {}
        self.failed: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.module, self.inputs = self._built()
        self.statics = storage_bytes([list(self.module.parameters()), list(self.module.buffers()), self.inputs])

    def _built(self) -> tuple[Any, tuple[Any, ...]]:
        import torch

        from optpass import models

        torch.manual_seed(self.seed)
        module, inputs = models.build(self.model, self.size, **self.overrides)
        return module.train(), inputs

    def _step(self, call: Callable[..., Any], module: Any) -> Callable[[], Any]:
        """Forward, backward, and the gradients let go of."""

        def step() -> None:
            call(module, *self.inputs).backward()
            module.zero_grad(set_to_none=True)

        return step

    def make(self, name: str, make: Callable[..., tuple[Callable[..., Any], Any]], *args: Any) -> None:
        """Add the way that `make(*args)` sets up."""
        self.add(name, make(*args))

    def attempt(self, name: str, run: Callable[..., None], *args: Any) -> None:
        """Run a way; one that fails is noted, and the others go on."""
        memory_journal.write(self.journal, name, self.answer())
        try:
            run(name, *args)
        except Exception as error:  # noqa: BLE001  # whatever it was: a verdict names it
            self.runs.pop(name, None)
            self.failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"

    def found(self, name: str) -> Way | None:
        """What was found of a way; None if it failed."""
        return self.runs[name].found if name in self.runs else None

    def answer(self) -> dict[str, Any]:
        """Everything found so far."""
        ways: dict[str, Way] = {name: dict(run.found) for name, run in self.runs.items()}
        ways |= {name: {"failed": text} for name, text in self.failed.items()}
        for name, other in self.same.items():
            ways[name] = ways[other] | ways.get(name, {})
        return {"statics": self.statics, "ways": ways, "same": self.same}

    def add(self, name: str, made: tuple[Callable[..., Any], Any]) -> None:
        """Run a way twice, and measure its peak in the second run."""
        from optpass.backend.memory.measure import measure_peak

        call, module = made
        start = time.process_time()
        step = self._step(call, module)
        step()
        found: Way = {"first_s": time.process_time() - start}
        peak = measure_peak(lambda: call(module, *self.inputs).backward())
        module.zero_grad(set_to_none=True)
        found |= {"peak": peak.bytes_above_start, "left": peak.bytes_left}
        self.runs[name] = _Run(step, found)

    # ---- the ways -----------------------------------------------------------------------------------------------

    def eager(self, checkpoint: bool) -> tuple[Callable[..., Any], Any]:
        """Plain eager."""
        if not checkpoint:
            return step_loss, self.module
        module, _ = self._built()
        return step_loss, checkpoint_blocks(module)

    def checkpointed(self) -> tuple[Callable[..., Any], Any]:
        """The same checkpointing, compiled."""
        module, _ = self._built()
        return compiled_anew(step_loss, self._plain_backend()), checkpoint_blocks(module)

    def pytorch(self, ratio: float) -> tuple[Callable[..., Any], Any]:
        """PyTorch's own budget."""
        from optpass.backend.compat.activation_budget import activation_memory_budget

        compiled = compiled_anew(step_loss, self._plain_backend())
        ready: list[bool] = []

        def call(*args: Any) -> Any:
            with contextlib.nullcontext() if ready else activation_memory_budget(ratio):
                ready.append(True)
                return compiled(*args)

        return call, self.module

    def optpass(self, name: str, above: int | None) -> None:
        """optpass with a budget of so many bytes above the statics; None for none that binds, 0 for its floor."""
        import optpass
        from optpass.errors import BudgetInfeasibleError

        budget = _ENDLESS if above is None else max(1, self.statics + above)
        optpass.reset_report()
        try:
            self.add(name, (compiled_anew(step_loss, "optpass", self._options(budget)), self.module))
        except BudgetInfeasibleError as error:
            budget = error.floor_bytes
            optpass.reset_report()
            self.add(name, (compiled_anew(step_loss, "optpass", self._options(budget)), self.module))
            if above:
                self.runs[name].found["infeasible"] = True
        report = optpass.report()
        site = [s for s in report.sites() + report.declined() if s.kind == "memory budget"][-1]
        self.runs[name].found |= {
            "budget": budget - self.statics,
            "predicted": int(site.cost["predicted_peak_bytes"]) - self.statics,
            "predicted slowdown": site.cost["predicted_slowdown"],
        }

    def beside(self, other: str) -> None:
        """optpass at the peak that the way `other` reaches; where it was run at about that peak already, that run."""
        wanted, name = self.found(other), beside(other)
        if wanted is None:
            self.failed[name] = f"{other} could not be run"
            return
        top, bottom = self.runs[UNCONSTRAINED], self.runs[FLOOR]
        for known, run in self.runs.items():
            if known.startswith("optpass at") and abs(run.found["budget"] / wanted["peak"] - 1) <= ONE_PEAK:
                self.same[name] = known
                return
        if wanted["peak"] >= top.found["peak"]:
            self.same[name] = UNCONSTRAINED
            return
        self.attempt(name, self.optpass, wanted["peak"])
        if bottom.found["budget"] > wanted["peak"] and name in self.runs:
            self.runs[name].found["infeasible"] = True

    def _options(self, budget: int) -> dict[str, Any]:
        return {"memory_budget": budget, "optimizer": "none", "inner": self.inner}

    def _plain_backend(self) -> str:
        return "inductor" if self.inner == "inductor" else "aot_eager_decomp_partition"

    # ---- time ---------------------------------------------------------------------------------------------------

    def time(self, rounds: int, budget_s: float) -> None:
        """Samples of all ways, interleaved. One thread: its processor time is what the step takes on a free core."""
        tick = clock("cpu", "cpu")
        begun = time.monotonic()
        for run in self.runs.values():
            run.found["samples"] = []
        for number, order in schedule(list(self.runs), rounds, self.seed):
            if number % 2 == 0 and number >= MIN_ROUNDS and time.monotonic() - begun >= budget_s:
                break
            memory_journal.write(self.journal, f"times, round {number + 1} of {rounds}", self.answer())
            gc.collect()
            taken = {name: tick(self.runs[name].step, 1) for name in order}
            for name, seconds in taken.items():  # whole rounds only: intervals pair them
                self.runs[name].found["samples"].append(seconds)


def step_loss(module: Any, *inputs: Any) -> Any:
    """The forward of a step; what is compiled, so that the loss is in the graph."""
    from optpass import models

    return models.loss(module(*inputs))


def compiled_anew(function: Any, backend: str, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """`function` compiled as if it never had been: Dynamo keeps what it compiled by code object, so it gets its own."""
    import torch

    fresh = types.FunctionType(function.__code__.replace(), function.__globals__, "step")
    compiled: Callable[..., Any] = torch.compile(fresh, backend=backend, options=options, fullgraph=True, dynamic=False)
    return compiled


def checkpoint_blocks(module: Any) -> Any:
    """`module`, in which every module of a `ModuleList` is checkpointed, as people write it by hand; in place."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        """A block computed again in the backward."""

        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(self.block, *args, use_reentrant=False, **kwargs)

    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    inside = {id(inner) for one in lists for inner in one.modules() if inner is not one}
    for outer in [one for one in lists if id(one) not in inside]:
        for index, block in enumerate(outer):
            outer[index] = Checkpointed(block)
    return module
