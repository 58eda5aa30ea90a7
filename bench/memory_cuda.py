"""The memory claim on a GPU: a Llama of about a billion parameters in bfloat16 with AdamW, at three budgets.

Each way runs in a process of its own (`memory_cuda_way`), because the allocator's peak is the process's: optpass at
each budget, full checkpointing of every block (eager and compiled), and PyTorch's `activation_memory_budget` sweep, of
which the fastest that fits is each budget's rival. The processes compile side by side, run one at a time, and stay:
samples, seconds of one whole step with the optimizer by CUDA events, are taken in interleaved rounds.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optpass.bench import memory_ways
from optpass.bench.environment import environment, usable_cores
from optpass.bench.harness import schedule
from optpass.bench.memory_judge import USED, Verdict, conclude
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, Row, sample_rows
from optpass.bench.stats import median
from optpass.bench.worker import Worker

#: 16 layers of width 2048: about 1.2 billion parameters with the vocabulary of 32,000.
LLAMA: Mapping[str, Any] = {
    "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 32_000,
    "context": 4096, "seq": 4096, "batch": 2, "targets": True,
}  # fmt: skip
QUICK: Mapping[str, Any] = {"layers": 4, "seq": 1024, "batch": 1}
#: Parts of the way from checkpointing's peak to the peak without a budget.
PARTS = (0.1, 0.4, 0.75)
RATIOS = (0.7, 0.4, 0.2, 0.0)
#: Rounds, and steps that each way is timed for in one.
ROUNDS, SAMPLES = 4, 3
CLAIM = (
    "On a Llama in bfloat16 with AdamW, peaks are 95% to 100% of the budget, and no way of PyTorch that fits is faster."
)

Answer = dict[str, Any]


@dataclass
class _Ways:
    """The processes, and what was found of each way.

    Attributes:
        lock: a file that is locked by whoever runs on the GPU.
    """

    overrides: Mapping[str, Any]
    seed: int
    lock: str
    progress: Progress
    found: dict[str, Answer] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)

    def prepare(self, ways: Mapping[str, Mapping[str, Any]]) -> None:
        """Set ways up and measure their peaks, side by side; one that fails is noted."""
        threads = str(max(1, usable_cores() // max(1, len(ways))))
        for name in ways:
            self.workers[name] = Worker(
                "optpass.bench.memory_cuda_way:serve", environ={"TORCHINDUCTOR_COMPILE_THREADS": threads},
                timeout_s=900.0, calls=1_000_000,
            )  # fmt: skip

        def one(name: str) -> None:
            try:
                self.found[name] = self.workers[name].call(
                    overrides=dict(self.overrides), seed=self.seed, lock=self.lock, **ways[name]
                )
            except BenchError as error:
                self.failed[name] = str(error)
                self.workers[name].close()  # and its memory with it
            self.progress.step(f"{name}: {self._told(name)}", 1)

        with ThreadPoolExecutor(len(ways)) as pool:
            list(pool.map(one, ways))

    def time(self, rounds: int) -> None:
        """Samples of all ways that were set up, in rounds."""
        for way in self.found.values():
            way["samples"] = []
        for number, order in schedule(list(self.found), rounds, self.seed):
            self.progress.step(f"round {number + 1} of {rounds}")
            for name in order:
                if name in self.failed:
                    continue
                try:
                    self.found[name]["samples"] += self.workers[name].call(samples=SAMPLES)
                except BenchError as error:
                    self.failed[name] = str(error)

    def complete(self) -> dict[str, Answer]:
        """Ways with a peak and with samples, in the order of their names' first use."""
        return {name: self.found[name] for name in self.workers if name in self.found and name not in self.failed}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def _told(self, name: str) -> str:
        return f"{self.found[name]['peak'] / 2**30:.2f} GiB" if name in self.found else self.failed[name]


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the ways on the GPU. Raises BenchError where not even checkpointing fits."""
    before = environment("cuda")
    rounds = config.rounds or (2 if config.quick else ROUNDS)
    overrides = dict(LLAMA) | (dict(QUICK) if config.quick else {})
    progress.start(len(RATIOS) + len(PARTS) + 3)
    with _ways(overrides, config.seed, progress) as ways:
        ways.prepare(
            {
                memory_ways.EAGER_CHECKPOINT: {"checkpoint": True, "compiled": False},
                memory_ways.COMPILED_CHECKPOINT: {"checkpoint": True},
                memory_ways.UNCONSTRAINED: {"budget": "95%"},
                **{memory_ways.pytorch(ratio): {"ratio": ratio} for ratio in RATIOS},
            }
        )
        for needed in (memory_ways.EAGER_CHECKPOINT, memory_ways.UNCONSTRAINED):
            if needed in ways.failed:
                raise BenchError(f"{needed}: {ways.failed[needed]}")
        low, top = (ways.found[n]["peak"] for n in (memory_ways.EAGER_CHECKPOINT, memory_ways.UNCONSTRAINED))
        budgets = {f"optpass, {(low + p * (top - low)) / 2**30:.2f} GiB": int(low + p * (top - low)) for p in PARTS}
        ways.prepare({name: {"budget": budget} for name, budget in budgets.items()})
        ways.time(rounds)
        found, failed = ways.complete(), dict(ways.failed)
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
            "peaks are of the fourth step, as torch.cuda.max_memory_allocated counts them",
            *(f"{name} could not be run: {why}" for name, why in failed.items()),
        ),
    )


@contextlib.contextmanager
def _ways(overrides: Mapping[str, Any], seed: int, progress: Progress) -> Iterator[_Ways]:
    with tempfile.TemporaryDirectory(prefix="optpass-bench-") as folder:
        ways = _Ways(overrides, seed, str(Path(folder) / "lock"), progress)
        try:
            yield ways
        finally:
            ways.close()


def judge(name: str, ways: Mapping[str, Answer], budget: int) -> Verdict:
    """Whether a budget holds and is used, and whether any other way that fits it is faster."""
    own = ways[name]
    part = own["peak"] / budget
    rivals = {n: w for n, w in ways.items() if not n.startswith("optpass") and w["peak"] <= budget}
    text = f"{part:.1%} of {budget / 2**30:.1f} GiB"
    holds = USED <= part <= 1
    if rivals:
        best = min(rivals, key=lambda n: median(rivals[n]["samples"]))
        ratio = median(own["samples"]) / median(rivals[best]["samples"])
        text += f", {ratio:.3f} of the time of {best}"
        holds = holds and ratio <= 1
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
