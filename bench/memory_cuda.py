"""The memory claim on a GPU: a Llama of about a billion parameters in bfloat16 with AdamW, at three budgets.

Each way runs in a process of its own (`memory_cuda_way`), because the allocator's peak is the process's: optpass at
each budget and without one that binds, full checkpointing of every block (eager and compiled), and PyTorch's
`activation_memory_budget` sweep, of which the fastest that fits is each budget's rival. optpass is given the attention
as it is written out in `models`, the others SDPA by hand. Budgets lie between the smallest peak and the one without a
budget of what `optpass.plan` says for the device.

The processes compile side by side, run one at a time, and stay: samples, seconds of one whole step with the optimizer
by CUDA events, are taken in interleaved rounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from optpass.bench import memory_ways
from optpass.bench.environment import environment, usable_cores
from optpass.bench.gpu_lock import lock_path, nobody_else
from optpass.bench.harness import schedule
from optpass.bench.memory_judge import USED, Verdict, conclude
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, Row, sample_rows
from optpass.bench.stats import median, ratio_interval, ratio_of_medians
from optpass.bench.worker import Worker

#: A billion parameters in a few wide layers: each of the ways is compiled by itself, in a time that grows with layers.
LLAMA: Mapping[str, Any] = {
    "layers": 4, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 11008, "vocab": 32_000,
    "context": 4096, "seq": 4096, "batch": 4, "targets": True,
}  # fmt: skip
QUICK: Mapping[str, Any] = {"seq": 1024, "batch": 1}
#: Parts of the way from the smallest peak to the peak without a budget.
PARTS = (0.15, 0.45, 0.8)
RATIOS = (1.0, 0.4, 0.1)
#: Rounds, and steps that each way is timed for in one.
ROUNDS, SAMPLES = 4, 3
#: Wall seconds after which no round begins but the first; a way may take three quarters of them to be set up.
BUDGET_S = 1800.0
CLAIM = (
    "On a Llama in bfloat16 with AdamW, peaks are 95% to 100% of the budget, and no way of PyTorch that fits is faster."
)
#: How the ways without a budget of optpass's are set up.
RIVALS: Mapping[str, Mapping[str, Any]] = {
    memory_ways.EAGER_CHECKPOINT: {"checkpoint": True, "compiled": False},
    memory_ways.COMPILED_CHECKPOINT: {"checkpoint": True},
    **{memory_ways.pytorch(ratio): {"ratio": ratio} for ratio in RATIOS},
}

Answer = dict[str, Any]


@dataclass
class _Ways:
    """The processes, and what was found of each way.

    Attributes:
        most: ways that there will be.
        budget_s: see `BUDGET_S`.
    """

    overrides: Mapping[str, Any]
    seed: int
    most: int
    budget_s: float
    progress: Progress
    found: dict[str, Answer] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock, self._begun = lock_path(), time.monotonic()
        self._pool = ThreadPoolExecutor(self.most)

    def prepare(self, ways: Mapping[str, Mapping[str, Any]]) -> list[Future[None]]:
        """Begin to set ways up and to measure their peaks, side by side; one that fails is noted."""
        threads = str(max(1, usable_cores() // self.most))
        for name in ways:
            self.workers[name] = Worker(
                "optpass.bench.memory_cuda_way:serve", environ={"TORCHINDUCTOR_COMPILE_THREADS": threads},
                timeout_s=max(1.0, 0.75 * self.budget_s - self._taken()), calls=1_000_000,
            )  # fmt: skip
        return [self._pool.submit(self._set_up, name, dict(how)) for name, how in ways.items()]

    def _set_up(self, name: str, how: dict[str, Any]) -> None:
        try:
            answer = self.workers[name].call(overrides=dict(self.overrides), seed=self.seed, lock=self.lock, **how)
            self.found[name] = answer
            self.progress.step(f"{name}: {answer['peak'] / 2**30:.2f} GiB, {self._taken():.0f} s", 1)
        except BenchError as error:
            self.failed[name] = str(error)
            self.workers[name].close()  # and its memory with it
            self.progress.step(f"{name}: {error}", 1)

    def time(self, rounds: int) -> None:
        """Samples of all ways that were set up, in rounds, until the time is over."""
        for way in self.found.values():
            way["samples"] = []
        with nobody_else(self.lock):
            for number, order in schedule(list(self.found), rounds, self.seed):
                if number and self._taken() >= self.budget_s:
                    return
                self.progress.step(f"round {number + 1} of {rounds}")
                for name in order:
                    if name in self.failed:
                        continue
                    try:
                        self.found[name]["samples"] += self.workers[name].call(samples=SAMPLES)
                    except BenchError as error:
                        self.failed[name] = str(error)

    def complete(self) -> dict[str, Answer]:
        """Ways with a peak and with samples, in the order in which they were begun."""
        return {name: self.found[name] for name in self.workers if name in self.found and name not in self.failed}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self._pool.shutdown(wait=True)

    def _taken(self) -> float:
        return time.monotonic() - self._begun


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the ways on the GPU. Raises BenchError where no way of PyTorch, or none of optpass, could be run."""
    before = environment("cuda")
    rounds = config.rounds or (2 if config.quick else ROUNDS)
    overrides = dict(LLAMA) | (dict(QUICK) if config.quick else {})
    most = len(RIVALS) + len(PARTS) + 1
    progress.start(most)
    budget_s = BUDGET_S if config.budget_s is None else config.budget_s
    ways = _Ways(overrides, config.seed, most, budget_s, progress)
    try:
        begun = ways.prepare({**RIVALS, memory_ways.UNCONSTRAINED: {"budget": "95%"}})
        low, top = _planned(overrides, before.device)
        budgets = {f"optpass, {(b := int(low + p * (top - low))) / 2**30:.2f} GiB": b for p in PARTS}
        begun += ways.prepare({name: {"budget": budget} for name, budget in budgets.items()})
        for one in begun:
            one.result()
        ways.time(rounds)
        found, failed = ways.complete(), dict(ways.failed)
    finally:
        ways.close()
    for group in (RIVALS, budgets):
        if not any(name in found for name in group):
            raise BenchError("; ".join(f"{name}: {failed[name]}" for name in group))
    verdicts = [judge(name, found, budget) for name, budget in budgets.items() if name in found]
    verdicts += [Verdict(name, False, f"could not be run: {failed[name]}") for name in budgets if name in failed]
    passed, finding = conclude(verdicts)
    return Result(
        name="memory",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config) | {"overrides": overrides, "rounds": rounds, "parts": PARTS, "ratios": RATIOS},
        rows=tuple(_rows(found, overrides, config)),
        passed=passed if config.full else None if passed else passed,
        finding=finding,
        notes=(
            "each way in a process of its own; a step is forward, backward and AdamW",
            "optpass is given attention written out, the others SDPA by hand; what is compiled returns the loss alone",
            "peaks are of the fourth step, as torch.cuda.max_memory_allocated counts them",
            f"optpass.plan says {low / 2**30:.2f} GiB for the smallest peak and {top / 2**30:.2f} without a budget",
            *(f"{name} could not be run: {why}" for name, why in failed.items()),
        ),
    )


def _planned(overrides: Mapping[str, Any], device: str) -> tuple[int, int]:
    """Bytes of the smallest peak that a plan has, and of the peak without a budget."""
    import optpass

    sets = {key: str(value) for key, value in overrides.items() if key != "batch"}
    plan = optpass.plan(
        "llama", size="8b", sets=sets, batch=overrides["batch"], dtype="bfloat16", optimizer="adamw", device=device
    )
    return plan.floor_bytes, plan.unconstrained_bytes


def judge(name: str, ways: Mapping[str, Answer], budget: int) -> Verdict:
    """Whether a budget holds and is used, and whether any other way that fits it is faster."""
    own = ways[name]
    part = own["peak"] / budget
    rivals = {n: w for n, w in ways.items() if not n.startswith("optpass") and w["peak"] <= budget}
    text = f"{part:.1%} of {budget / 2**30:.1f} GiB"
    holds: bool | None = USED <= part <= 1
    if rivals:
        best = min(rivals, key=lambda n: median(rivals[n]["samples"]))
        pair = rivals[best]["samples"], own["samples"]
        ratio, interval = ratio_of_medians(*pair), ratio_interval(*pair)
        low, high = interval or (ratio, ratio)
        text += f", {ratio:.3f} [{low:.3f}, {high:.3f}] of the time of {best}"
        faster = True if high <= 1 else False if low > 1 else None
        holds = holds and faster
    else:
        text += ", no way of PyTorch fits"
    return Verdict(name, holds, text)


def _rows(ways: Mapping[str, Answer], overrides: Mapping[str, Any], config: BenchConfig) -> list[Row]:
    tokens = overrides["batch"] * overrides["seq"]
    rows = sample_rows(
        {n: w["samples"] for n, w in ways.items()},
        tolerance=config.tolerance, seed=config.seed, group="llama, bf16, AdamW",
    )  # fmt: skip
    extras = {
        n: {"peak GiB": w["peak"] / 2**30, "tokens/s": tokens / median(w["samples"])}
        | ({"predicted GiB": w["predicted"] / 2**30} if w.get("predicted") else {})
        for n, w in ways.items()
    }
    return [row.model_copy(update={"extra": extras[row.case]}) for row in rows]
