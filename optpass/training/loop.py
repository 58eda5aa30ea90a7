"""The training loop: a generator of step events. It builds, compiles, prints and writes nothing."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from optpass.training.config import TrainingConfig
from optpass.training.data import Batches, stream_seed
from optpass.training.errors import TrainError

#: Steps after the first that may still be slow (a second compile, a cold allocator) and say nothing of the rest.
SETTLING_STEPS = 2
#: The word that keeps the random streams of dropout apart from those of the batches.
_DROPOUT_STREAM = 1
#: The learning rate at the last step, as a share of the peak.
_LAST_RATE = 0.1


#: Runs a step for somebody who measures it, and returns the step's loss.
Measure = Callable[[Callable[[], float], torch.optim.Optimizer], float]


@dataclass(frozen=True)
class _Choice:
    """An optimizer of the training file: its class in torch.optim, its settings, its name in the memory ledger."""

    kind: str
    ledger: str
    settings: Mapping[str, Any]
    fuses: bool = False


OPTIMIZERS: Mapping[str, _Choice] = MappingProxyType(
    {
        "adamw": _Choice("AdamW", "adamw", {"betas": (0.9, 0.99)}, fuses=True),
        "adam": _Choice("Adam", "adam", {"betas": (0.9, 0.99)}, fuses=True),
        "sgd": _Choice("SGD", "sgd_momentum", {"momentum": 0.9}),
        "adafactor": _Choice("Adafactor", "adafactor", {}),
    }
)


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step that has ended."""

    step: int  #: from 1
    loss: float  #: mean over the step's tokens, in nats
    step_s: float  #: seconds, batch and optimizer included
    tokens_per_s: float
    lr: float

    def to_json(self) -> dict[str, float]:
        """The event as plain data."""
        return dict(vars(self))


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate at a step (from 0): linear over `warmup` steps, then half a cosine down to a tenth of the peak
    (Loshchilov and Hutter 2017, without restarts)."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer over the model's trainable parameters; vectors (norms, biases) are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind: Any = getattr(torch.optim, OPTIMIZERS[config.optimizer].kind)
    return kind(groups, lr=config.learning_rate, **optimizer_settings(config))  # type: ignore[no-any-return]


def optimizer_settings(config: TrainingConfig) -> dict[str, Any]:
    """What the optimizer is constructed with, beside groups and learning rate."""
    choice = OPTIMIZERS[config.optimizer]
    settings = dict(choice.settings)
    if choice.fuses and torch.device(config.device).type in ("cpu", "cuda"):
        settings["fused"] = True
    return settings


def precision(config: TrainingConfig) -> contextlib.AbstractContextManager[Any]:
    """The autocast region that the model's calls stand in."""
    if config.precision == "bf16":
        return torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def loss_of(fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss alone of a model that returns (logits, loss).

    Logits that nobody reads need not outlive the forward, and have no gradient that would have to be made.
    """

    # `fn` is what `source.clean_path` strips from module paths: the user's model starts below it.
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return fn(tokens, targets)[1]

    return step


def train_steps(
    forward: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    measure: Measure | None = None,
) -> Iterator[StepEvent]:
    """Train `model` for `config.steps` steps and yield an event after each.

    The random state is set anew before every micro-batch, so that step n is the same whatever ran in between.

    Args:
        forward: takes tokens and targets and returns the loss: `loss_of` the model, or what that was compiled into.
        model: whose parameters are trained.
        batches: where tokens and targets come from.
        config: the training file's table.
        measure: runs one step for the caller, which measures what it allocates: the second, when the optimizer has its
            state and everything is compiled, or the only one.

    Raises:
        TrainError: the loss is not finite.
    """
    optimizer = make_optimizer(model, config)
    model.train()
    measured = min(1, config.steps - 1)
    for step in range(config.steps):
        started = time.perf_counter()
        rate = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        run = functools.partial(_one_step, forward, model, optimizer, batches, config, step)
        value = measure(run, optimizer) if measure is not None and step == measured else run()
        seconds = time.perf_counter() - started
        if not math.isfinite(value):
            raise TrainError(
                f"the loss is {value} at step {step + 1}; lower learning_rate ({rate:.3g} now) or grad_clip"
            )
        yield StepEvent(step + 1, value, seconds, config.tokens_per_step / seconds, rate)


def _one_step(
    forward: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    config: TrainingConfig,
    step: int,
) -> float:
    """One optimizer step; the mean loss of its micro-batches."""
    total = torch.zeros((), device=config.device)
    for micro in range(config.accumulation):
        torch.manual_seed(stream_seed(config.seed, step, micro, _DROPOUT_STREAM))
        with precision(config):
            loss = forward(*batches.train(step, micro))
        (loss / config.accumulation).backward()  # type: ignore[no-untyped-call, unused-ignore]
        total += loss.detach().float() / config.accumulation
    if config.grad_clip:
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)  # waits for the device, optimizer included, so that the caller's clock is right


def validation_loss(model: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]], config: TrainingConfig) -> float:
    """Mean loss per token over held-out micro-batches, in evaluation mode; the mode is put back.

    Call it with the plain module: compiling once more for evaluation would cost more than it saves.
    """
    training = model.training
    model.eval()
    try:
        total, count = 0.0, 0
        with torch.no_grad(), precision(config):
            for tokens, targets in pairs:
                total += float(model(tokens, targets)[1]) * targets.numel()
                count += targets.numel()
        return total / count
    finally:
        model.train(training)


def steady_seconds(events: Sequence[StepEvent]) -> float | None:
    """Median seconds of the steps after the first and `SETTLING_STEPS` more; None where there are none."""
    rest = [event.step_s for event in events[1 + SETTLING_STEPS :]]
    return statistics.median(rest) if rest else None
