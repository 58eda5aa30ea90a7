"""The memory claim on a GPU: a Llama of about a billion parameters in bfloat16 with AdamW, at three budgets.

Each way runs in a process of its own, because the allocator's peak is the process's: optpass at each budget, full
checkpointing of every block (eager and compiled), and PyTorch's `activation_memory_budget` sweep, of which the fastest
that fits is each budget's rival. Samples are seconds of one whole step, optimizer included, by CUDA events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from optpass.bench import memory_ways
from optpass.bench.clocks import clock
from optpass.bench.environment import environment
from optpass.bench.isolate import run_isolated
from optpass.bench.memory_judge import USED, Verdict, conclude
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import BenchError, Result, Row, sample_rows
from optpass.bench.stats import median

#: 16 layers of width 2048: about 1.2 billion parameters with the vocabulary of 32,000.
LLAMA: Mapping[str, Any] = {
    "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 32_000,
    "context": 4096, "seq": 4096, "batch": 4, "targets": True,
}  # fmt: skip
#: Parts of the way from checkpointing's peak to the peak without a budget.
PARTS = (0.1, 0.4, 0.75)
RATIOS = (0.8, 0.6, 0.4, 0.2, 0.1, 0.0)
ROUNDS = 12
CLAIM = (
    "On a Llama in bfloat16 with AdamW, peaks are 95% to 100% of the budget, and no way of PyTorch that fits is faster."
)

Answer = dict[str, Any]


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure the ways on the GPU. Raises BenchError where not even checkpointing fits."""
    before = environment("cuda")
    rounds = config.rounds or (3 if config.quick else ROUNDS)
    overrides = dict(LLAMA) | ({"layers": 4, "seq": 1024, "batch": 1} if config.quick else {})
    progress.start(len(RATIOS) + len(PARTS) + 3)
    ways: dict[str, Answer] = {}

    def measured(name: str, **how: Any) -> Answer:
        progress.step(name)
        arguments = {"overrides": overrides, "rounds": rounds, "seed": config.seed} | how
        ways[name] = run_isolated("optpass.bench.memory_cuda:sample", arguments)
        progress.step(name, 1)
        return ways[name]

    low = measured(memory_ways.EAGER_CHECKPOINT, checkpoint=True, compiled=False)["peak"]
    measured(memory_ways.COMPILED_CHECKPOINT, checkpoint=True)
    for ratio in RATIOS:
        _unless_out_of_memory(lambda r=ratio: measured(memory_ways.pytorch(r), ratio=r))
    top = measured(memory_ways.UNCONSTRAINED, budget="95%")["peak"]
    budgets = {f"optpass, {int(low + part * (top - low)) / 2**30:.1f} GiB": low + part * (top - low) for part in PARTS}
    for name, budget in budgets.items():
        measured(name, budget=int(budget))
    verdicts = [judge(name, ways, int(budget)) for name, budget in budgets.items()]
    passed, finding = conclude(verdicts)
    return Result(
        name="memory",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config) | {"overrides": overrides, "rounds": rounds, "parts": PARTS, "ratios": RATIOS},
        rows=tuple(_rows(ways, overrides, config)),
        passed=passed if config.full else None if passed else passed,
        finding=finding,
        notes=("each way in a process of its own; a step is forward, backward and AdamW",),
    )


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


def _unless_out_of_memory(call: Any) -> None:
    try:
        call()
    except BenchError as error:
        if "OutOfMemory" not in str(error):
            raise


def _rows(ways: Mapping[str, Answer], overrides: Mapping[str, Any], config: BenchConfig) -> list[Row]:
    tokens = overrides["batch"] * overrides["seq"]
    rows = sample_rows(
        {n: w["samples"] for n, w in ways.items()},
        tolerance=config.tolerance, seed=config.seed, group="llama, bf16, AdamW",
    )  # fmt: skip
    extras = {n: {"peak GiB": w["peak"] / 2**30, "tokens/s": tokens / median(w["samples"])} for n, w in ways.items()}
    return [row.model_copy(update={"extra": extras[row.case]}) for row in rows]


def sample(
    overrides: Mapping[str, Any], rounds: int, seed: int, *, checkpoint: bool = False, compiled: bool = True,
    ratio: float = 1.0, budget: int | str | None = None,
) -> Answer:  # fmt: skip
    """One way in this process, which must be fresh: `peak` bytes of a step, everything counted, and `samples`.

    Args:
        checkpoint: every block is checkpointed.
        compiled: not eager.
        ratio: PyTorch's budget.
        budget: optpass's, bytes or text; None for plain Inductor.
    """
    import torch

    from optpass import models
    from optpass.backend.compat.activation_budget import activation_memory_budget

    torch.manual_seed(seed)
    with torch.device("cuda"):
        module, inputs = models.build("llama", "8b", dtype=torch.bfloat16, **overrides)
    if checkpoint:
        module = memory_ways.checkpoint_blocks(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    call: Any = module
    if compiled:
        options: Any = None if budget is None else {"memory_budget": budget, "optimizer": "adamw"}
        call = torch.compile(module, backend="inductor" if budget is None else "optpass", options=options)

    def step() -> None:
        models.loss(call(*inputs)).backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with activation_memory_budget(ratio):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    tick = clock("cuda")
    return {"peak": peak, "samples": [tick(step, 1) for _ in range(rounds)]}
