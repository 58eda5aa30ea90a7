"""Claim: a model in several graphs compiles under a memory budget in at most `GOAL` times plain Inductor's time.

What several graphs may use is known once their step was seen, so that plans are chosen again then, and graphs may be
compiled again. A sample is the processor time of the first `STEPS` training steps, forward, backward and optimizer, in
a fresh process with empty caches: the C++ compiler's included, imports and what is paid once in a process not. All
correction rounds are in it. The model is a GPT of four blocks with graph breaks between them. Attention is left as it
is written: fused, it is less to compile. Budgets lie between the smallest peak of the step and what it needs without a
budget, as the report names both once the step was seen.

A round takes one sample of each case in the order that `harness.schedule` gives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optpass.bench.clocks import check_device, cpu_seconds
from optpass.bench.environment import environment
from optpass.bench.harness import schedule
from optpass.bench.isolate import run_isolated
from optpass.bench.memory_compile import INDUCTOR
from optpass.bench.progress import Progress
from optpass.bench.registry import BenchConfig
from optpass.bench.result import Result, Row, sample_rows
from optpass.bench.stats import ratio_interval, ratio_of_medians

if TYPE_CHECKING:
    from torch import nn

GOAL = 1.6
CLAIM = (
    f"Models in several graphs compile under a memory budget, correction rounds included, in at most {GOAL} times the "
    "processor time of plain Inductor."
)

STEPS = 3
ROUNDS = 5
#: Wall seconds after which no round begins.
BUDGET_S = 1500.0
#: Graphs that the model is broken into.
GRAPHS = (2, 4)
#: Where budgets lie between the smallest peak (0) and what the step needs without one (1).
PARTS = (0.5, 0.8)
MODEL: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "vocab": 512, "batch": 8, "seq": 128, "targets": True}
ENVIRON = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

Samples = dict[str, list[float]]


def run(config: BenchConfig, progress: Progress) -> Result:
    """Measure each number of graphs, and judge the claim by the intervals of the ratios.

    Raises:
        ConfigError: an unknown number of graphs, or no such device.
        BenchError: a sample failed; the line names it.
    """
    check_device(config.device)
    chosen = [int(name) for name in config.models] or list(GRAPHS[:1] if config.quick else GRAPHS)
    rounds = config.rounds or (1 if config.quick else ROUNDS)
    budget_s = config.budget_s if config.budget_s is not None else BUDGET_S
    before = environment(config.device)
    progress.start(len(chosen))
    measured = {graphs: _measured(graphs, rounds, budget_s / len(chosen), config, progress) for graphs in chosen}
    rows = [row for graphs, samples in measured.items() for row in _rows(graphs, samples, config)]
    verdicts = [one for graphs, samples in measured.items() for one in _judge(graphs, samples, config.seed)]
    held = [holds for holds, _ in verdicts]
    return Result(
        name="memory_graphs",
        claim=CLAIM,
        environment=before.finished(),
        config=asdict(config)
        | {"models": [str(one) for one in chosen], "rounds": rounds, "budget_s": budget_s, "parts": PARTS}
        | {"goal": GOAL, "steps": STEPS, "model": MODEL, "environ": ENVIRON},
        rows=tuple(rows),
        passed=False if False in held else True if config.full and None not in held else None,
        finding="; ".join(text for _, text in verdicts),
        notes=(
            f"processor time of the first {STEPS} training steps in a fresh process, one compile thread, no caches",
        ),
    )


def model_names() -> tuple[str, ...]:
    """What `BenchConfig.models` may name: numbers of graphs."""
    return tuple(str(graphs) for graphs in GRAPHS)


def figures(graphs: int, device: str, seed: int) -> dict[str, float]:
    """The smallest peak of the step and what it needs without a budget, bytes, in this process."""
    import optpass

    _steps(graphs, 1 << 50, device, seed, 2)
    report = optpass.report()
    sites = [site for site in (*report.sites(), *report.declined()) if site.kind == "memory budget"]
    return {name: max(site.cost[f"{name}_bytes"] for site in sites) for name in ("floor", "unconstrained")}


def sample(graphs: int, budget: int | None, device: str, seed: int) -> dict[str, float]:
    """Processor seconds of the first steps, in this process, which must be fresh; None for plain Inductor."""
    return {"seconds": _steps(graphs, budget, device, seed, STEPS)}


def _steps(graphs: int, budget: int | None, device: str, seed: int, n: int) -> float:
    import torch

    backend = "inductor" if budget is None else "optpass"
    options: dict[str, Any] | None = None if budget is None else {"memory_budget": budget, "attention": "off"}
    torch.manual_seed(seed)

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1).sin() + 1

    x = torch.randn(3, 3, requires_grad=True, device=device)
    torch.autograd.backward(torch.compile(tiny, backend=backend)(x).sum())  # what is paid once in a process
    model, inputs = broken(graphs, device)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend=backend, options=options)
    start = sum(cpu_seconds())
    for _ in range(n):
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(compiled(*inputs))
        optimizer.step()
    return sum(cpu_seconds()) - start


def broken(graphs: int, device: str = "cpu") -> tuple[nn.Module, tuple[Any, ...]]:
    """A GPT that returns its loss, with breaks behind its blocks, and its inputs."""
    import torch
    from torch import nn

    from optpass import models

    class Broken(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.often = graphs > 2

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            model: Any = self.model
            one, two, three, four = model.blocks  # a break in a loop would leave all of it to eager
            x = one(model.drop(model.wte(tokens) + model.wpe.weight[: tokens.size(1)]))
            if self.often:
                torch._dynamo.graph_break()
            x = two(x)
            torch._dynamo.graph_break()
            x = three(x)
            if self.often:
                torch._dynamo.graph_break()
            logits = model.lm_head(model.ln_f(four(x)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model, inputs = models.build("gpt", "tiny", context=MODEL["seq"], **MODEL)
    return Broken(model).to(device), tuple(one.to(device) for one in inputs)


def _measured(graphs: int, rounds: int, budget_s: float, config: BenchConfig, progress: Progress) -> Samples:
    """Interleaved samples, by whole rounds; a round begins where it should end in time."""
    arguments = {"graphs": graphs, "device": config.device, "seed": config.seed}
    begun = time.monotonic()
    progress.step(f"{graphs} graphs: what the step needs", 1)
    ends = run_isolated("optpass.bench.memory_graphs:figures", arguments, environ=ENVIRON)
    budgets: dict[str, int | None] = {INDUCTOR: None}
    for part in PARTS:
        budgets[case(part)] = int(ends["floor"] + part * (ends["unconstrained"] - ends["floor"]))
    samples: Samples = {name: [] for name in budgets}
    for number, order in schedule(list(budgets), rounds, config.seed):
        if number and (time.monotonic() - begun) * (number + 1) / number > budget_s:
            break
        taken = {}
        for name in order:
            progress.step(f"{graphs} graphs, round {number + 1}: {name}")
            given = arguments | {"budget": budgets[name]}
            taken[name] = run_isolated("optpass.bench.memory_graphs:sample", given, environ=ENVIRON)["seconds"]
        for name, seconds in taken.items():
            samples[name].append(seconds)
    return samples


def case(part: float) -> str:
    """The name of a budget that lies at `part`."""
    return f"optpass, {part:.0%} of the way from the floor"


def _rows(graphs: int, samples: Mapping[str, Sequence[float]], config: BenchConfig) -> list[Row]:
    return sample_rows(samples, tolerance=config.tolerance, seed=config.seed, group=f"gpt in {graphs} graphs")


def _judge(graphs: int, samples: Mapping[str, Sequence[float]], seed: int) -> list[tuple[bool | None, str]]:
    """Each budget by the interval of its ratio to plain Inductor."""
    found: list[tuple[bool | None, str]] = []
    for name, own in samples.items():
        if name == INDUCTOR:
            continue
        text = f"{graphs} graphs, {name}: {ratio_of_medians(samples[INDUCTOR], own):.2f} times Inductor's"
        bounds = ratio_interval(samples[INDUCTOR], own, seed=seed)
        if bounds is None:
            found.append((None, f"{text} (too few rounds for an interval)"))
            continue
        holds = True if bounds.high <= GOAL else False if bounds.low > GOAL else None
        found.append((holds, f"{text} [{bounds.low:.2f}, {bounds.high:.2f}], goal {GOAL}"))
    return found
